"""Trains the demo's eyes on drawings made as it runs, on one GPU.

    cd backend && python -m training.vision.train --minutes 8 --out FOLDER

The language model is frozen (soft rows steer it), or tuned with the embedded model's own training
text beside it, on which it is held to what it said before. It writes `eyes.safetensors`,
`language.safetensors` (tuned only) and `report.txt` while it runs.
"""

from __future__ import annotations

import argparse
import os
import queue
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import torch
import torch._dynamo
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from training.vision.cases import Case, cases, table
from training.vision.demo import MODEL
from training.vision.feed import Feed, Store
from training.vision.hints import Hints
from training.vision.model import ROWS, Eyes, Language, language
from training.vision.samples import BLOCK, PLACEHOLDER, tokenizer
from training.vision.shape import TOWER

STARTED = time.perf_counter()
HINTED = 0.6  # the share of training in which hints count


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="of all that the program does")
    parser.add_argument("--steps", type=int, default=1_000_000, help="stop after so many")
    parser.add_argument("--batch", type=int, default=256, help="pictures in a step")
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--language", choices=("frozen", "tuned"), default="tuned")
    parser.add_argument("--language-rate", type=float, default=3e-4)
    parser.add_argument("--replay", type=int, default=8_192, help="tokens of text in a step")
    parser.add_argument("--warm", type=float, default=0.15, help="share with the language frozen")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 5))
    parser.add_argument("--writers", type=int, default=4, help="processes that write texts")
    parser.add_argument("--store", type=int, default=160_000, help="pictures kept on the device")
    parser.add_argument("--cases", type=int, default=2048, help="held-out questions at the end")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=Path, help="folder of a run to go on from")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


class Log:
    """Prints lines and keeps them in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, text: str) -> None:
        print(text, flush=True)
        with self._path.open("a") as file:
            file.write(f"{text}\n")


def prepared(pictures: Tensor) -> Tensor:
    """Return pixels as the tower takes them: (b, 3, 256, 256) from -1 to 1."""
    return pictures.permute(0, 3, 1, 2).contiguous().float() / 127.5 - 1


def embedded(model: Language, ids: Tensor, places: Tensor, features: Tensor) -> Tensor:
    """Return embeddings with features in the rows of pictures; a second one is the neighbour's."""
    x = model.embed_tokens(ids)
    own = torch.arange(len(ids), device=ids.device)
    rows, values, at = [], [], []
    neighbour = own - own % BLOCK + (own % BLOCK + 1) % BLOCK
    for which, source in enumerate((own, neighbour)):
        chosen = own[places[:, which] >= 0]
        rows.append(chosen)
        at.append(places[chosen, which])
        values.append(features[source[chosen]])
    steps = torch.arange(ROWS, device=ids.device)
    columns = torch.cat(at)[:, None] + steps
    index = (torch.cat(rows)[:, None].expand_as(columns), columns)
    return x.index_put(index, torch.cat(values).to(x.dtype))


class Training:
    """Eyes, hints and language model with their optimizer."""

    def __init__(self, args: argparse.Namespace, device: torch.device, log: Log) -> None:
        torch.manual_seed(args.seed)
        self.args, self.device, self.log = args, device, log
        self.language = language(MODEL).to(device)
        self.teacher = deepcopy(self.language).requires_grad_(False)
        self.eyes = Eyes(TOWER, self.language.embed_tokens.embedding_dim).to(device)
        self.hints = Hints(int(str(TOWER["hidden_size"]))).to(device)
        if args.start:
            self._go_on_from(args.start)
        self.tuned = args.language == "tuned"
        self.language.requires_grad_(self.tuned)
        groups = [
            {"params": [*self.eyes.parameters(), *self.hints.parameters()], "peak": args.rate}
        ]
        if self.tuned:
            groups.append({"params": [*self.language.parameters()], "peak": args.language_rate})
        self.optimizer = torch.optim.AdamW(
            groups, lr=args.rate, betas=(0.9, 0.98), weight_decay=0.03, fused=device.type == "cuda"
        )
        self.tower: Callable[[Tensor], Tensor] = self.eyes.vision_model
        self.hidden: Callable[[Tensor], Tensor] = self.language.hidden
        if device.type == "cuda" and not args.no_compile:
            torch._dynamo.config.suppress_errors = True  # what can't be compiled runs as it is
            self.tower = torch.compile(self.eyes.vision_model, dynamic=False)
            self.hidden = torch.compile(self.language.hidden, dynamic=False)

    def _go_on_from(self, folder: Path) -> None:
        state = load_file(folder / "eyes.safetensors")
        self.eyes.load_state_dict(
            {n.removeprefix("eyes."): w for n, w in state.items() if n.startswith("eyes.")}
        )
        self.hints.load_state_dict(
            {n.removeprefix("hints."): w for n, w in state.items() if n.startswith("hints.")}
        )
        if (folder / "language.safetensors").is_file():
            found = load_file(folder / "language.safetensors")
            names = {n.removeprefix("model."): w.float() for n, w in found.items()}
            self.language.load_state_dict(names)

    def set_rates(self, progress: float, step: int, all_: bool) -> None:
        """Set the learning rates; the language model's is 0 unless `all_`."""
        factor = min(1.0, step / 400) * max(0.01, min(1.0, 1.6 * (1 - progress)) ** 1.5)
        eyes, *language = self.optimizer.param_groups
        eyes["lr"] = eyes["peak"] * factor
        for group in language:
            group["lr"] = group["peak"] * factor if all_ else 0.0

    def seen(self, batch: list[Tensor], progress: float) -> tuple[Tensor, Tensor]:
        """Return the loss; and, to be told, that of the answers, that of the hints and the share of
        answers that are right in every word, (3,)."""
        pictures, ids, rounds, places, shapes, colours, texts = batch
        ids, places = ids.long(), places.long()
        patches = self.tower(prepared(pictures))
        features = self.eyes.connector(patches)
        hidden = self.hidden(embedded(self.language, ids, places, features))[:, :-1]
        rounds, targets = rounds[:, 1:], ids[:, 1:]
        where = rounds > 0
        logits = self.language.logits(hidden[where]).float()
        losses = F.cross_entropy(logits, targets[where], reduction="none")
        answers = losses.mean()
        loss, hints = answers, torch.zeros_like(answers)
        if (weight := max(0.0, 1 - progress / HINTED)) > 0:
            hints = self.hints(patches, shapes, colours, texts)
            loss = loss + 0.5 * weight * hints
        with torch.no_grad():
            wrong = (logits.argmax(-1) != targets[where]).float()
            row = torch.arange(len(ids), device=ids.device)[:, None] * 64 + rounds
            counts = torch.zeros(len(ids) * 64, device=ids.device)
            total = counts.scatter(0, row[where], 1.0).sum()
            bad = counts.scatter_add(0, row[where], wrong).clamp(max=1).sum()
        return loss, torch.stack((answers.detach(), hints.detach(), 1 - bad / total))

    def recalled(self, ids: Tensor, where: Tensor) -> Tensor:
        """Return how far what the language model says to texts is from what it said before."""
        where = where[:, 1:]
        with torch.no_grad():
            before = self.teacher.hidden(self.teacher.embed_tokens(ids))[:, :-1][where]
            wanted = self.teacher.logits(before).float().log_softmax(-1)
        now = self.language.hidden(self.language.embed_tokens(ids))[:, :-1][where]
        said = self.language.logits(now).float().log_softmax(-1)
        return F.kl_div(said, wanted, log_target=True, reduction="batchmean")

    def step(
        self, batch: list[Tensor], text: tuple[Tensor, Tensor] | None, progress: float
    ) -> Tensor:
        """Take a step and return what `seen` tells, and the loss on texts, (4,)."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss, told = self.seen(batch, progress)
            recall = torch.zeros((), device=self.device)
            if text is not None:
                recall = self.recalled(*text)
                loss = loss + recall
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        self.optimizer.step()
        return torch.cat((told, recall.detach()[None]))

    def save(self) -> None:
        """Write the weights: eyes and hints in float32, the language model as it is shipped."""
        state = {f"eyes.{name}": w for name, w in self.eyes.state_dict().items()}
        state |= {f"hints.{name}": w for name, w in self.hints.state_dict().items()}
        _write(state, self.args.out / "eyes.safetensors")
        if self.tuned:
            words = {f"model.{n}": w.bfloat16() for n, w in self.language.state_dict().items()}
            _write(words, self.args.out / "language.safetensors")

    @torch.no_grad()
    def answers(self, asked: list[Case], longest: int = 40) -> list[str]:
        """Answer questions greedily, a whole batch at a time."""
        said: list[str] = []
        for at in range(0, len(asked), 512):
            said += self._answers(asked[at : at + 512], longest)
        return said

    def _answers(self, asked: list[Case], longest: int) -> list[str]:
        prompts = [case.prompt() for case in asked]
        sizes = torch.tensor([len(prompt.ids) for prompt in prompts], device=self.device)
        width = max(len(prompt.ids) for prompt in prompts) + longest
        ids = torch.full((len(asked), width), PLACEHOLDER, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt.ids)] = torch.tensor(prompt.ids)
        ids = ids.to(self.device)
        places = torch.full((len(asked), 2), -1, device=self.device)
        places[:, 0] = torch.tensor([prompt.places[0] for prompt in prompts])
        pictures = torch.stack([torch.from_numpy(case.picture) for case in asked]).to(self.device)
        rows = torch.arange(len(asked), device=self.device)
        end = tokenizer().token_to_id("<|eot_id|>")
        ended = torch.zeros(len(asked), dtype=torch.bool, device=self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            features = self.eyes(prepared(pictures))
            for new in range(longest):
                hidden = self.language.hidden(embedded(self.language, ids, places, features))
                last = hidden[rows, sizes + new - 1]
                tokens = self.language.logits(last).argmax(-1)
                ids[rows, sizes + new] = tokens
                ended |= tokens == end
                if ended.all():
                    break
        texts = []
        for row, size in zip(ids.tolist(), sizes.tolist(), strict=True):
            answer = row[size : size + longest]
            answer = answer[: answer.index(end)] if end in answer else answer
            texts.append(str(tokenizer().decode(answer, skip_special_tokens=False)))
        return texts

    def round_weights(self) -> None:
        """Round all weights to bfloat16, as they are shipped."""
        for module in (self.eyes, self.language):
            for parameter in module.parameters():
                parameter.data = parameter.data.bfloat16().float()


def _write(state: dict[str, Tensor], path: Path) -> None:
    part = path.with_suffix(".part")
    save_file({name: w.detach().cpu().contiguous() for name, w in state.items()}, part)
    part.replace(path)


class Texts:
    """Batches of the embedded model's own training text, from processes that write it."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self._args, self._device = args, device
        self._ready: queue.Queue[tuple[Tensor, Tensor]] = queue.Queue(64)
        self._last: tuple[Tensor, Tensor] | None = None
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        from batches import batches  # a program of training/demo

        first = 50_000_000 + self._args.seed * 100_000
        for ids, mask in batches(MODEL, first, self._args.replay, self._args.writers):
            self._ready.put((torch.from_numpy(ids.astype("int64")), torch.from_numpy(mask)))

    def batch(self) -> tuple[Tensor, Tensor] | None:
        """Return tokens, and where they are answers; the last ones again where none are ready, and
        None before the first."""
        try:
            ids, where = self._ready.get_nowait()
        except queue.Empty:
            return self._last
        self._last = ids.to(self._device), where.to(self._device)
        return self._last


def train(args: argparse.Namespace, training: Training, feed: Feed, log: Log) -> None:
    """Take steps until the time is up."""
    store = Store(max(1, args.store // BLOCK), training.device)
    blocks = max(1, args.batch // BLOCK)
    texts = Texts(args, training.device) if training.tuned else None
    feed.pour(store)
    store.wait(min(4 * blocks, store.capacity))
    asked = cases(min(256, args.cases), "held out", seed=7)
    reserve = min(0.8, args.minutes / 8) * 60
    begun = time.perf_counter()
    room = STARTED + args.minutes * 60 - reserve - begun
    log(f"training for {room:.0f} s")
    sums, count, told, saved = torch.zeros(4, device=training.device), 0, begun, begun
    for step in range(1, args.steps + 1):
        now = time.perf_counter()
        progress = max((now - begun) / room, step / args.steps)
        if progress >= 1:
            break
        text = texts.batch() if texts and progress > args.warm else None
        training.set_rates(progress, step, text is not None)
        sums += training.step(store.batch(blocks), text, progress)
        count += 1
        if step in (1, 20, 100) or now - told > 15:
            loss, hints, right, recall = (sums / count).tolist()
            log(
                f"{now - STARTED:.0f} s step {step} loss {loss:.4f} hints {hints:.3f} "
                f"texts {recall:.5f} right {right:.1%} "
                f"drawn {store.made * BLOCK} shown {step * blocks * BLOCK}"
            )
            sums, count, told = torch.zeros_like(sums), 0, now
        if now - saved > 60:
            training.save()
            log(table(asked, training.answers(asked)).splitlines()[-1])
            saved = now
    if texts:
        log(agreement(training, texts))


@torch.no_grad()
def agreement(training: Training, texts: Texts) -> str:
    """Say how many answers to texts not yet seen have, word by word, the most likely ones as
    before."""
    same = total = 0
    for _ in range(min(40, training.args.cases)):
        text = texts.batch()
        if text is None:
            break
        ids, where = text[0], text[1][:, 1:]
        before, now = (
            model.logits(model.hidden(model.embed_tokens(ids))[:, :-1]).argmax(-1)
            for model in (training.teacher, training.language)
        )
        same += int((((before == now) | ~where).all(1)).sum())
        total += len(ids)
    return f"texts answered as before: {same} of {total}"


def main() -> None:
    args = options()
    args.out.mkdir(parents=True, exist_ok=True)
    log = Log(args.out / "report.txt")
    torch.set_float32_matmul_precision("high")
    with Feed(args.workers, 16 * args.workers, args.seed * 10_000_000) as feed:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        training = Training(args, device, log)
        train(args, training, feed, log)
        training.save()
    training.round_weights()
    for split in ("held out", "train"):
        asked = cases(args.cases, split)
        said = training.answers(asked)
        log(f"wordings: {split}\n{table(asked, said)}")
        wrong = [(c, a) for c, a in zip(asked, said, strict=True) if c.answer != a]
        for case, answer in wrong[:25]:
            log(f"  {case.question!r}: {case.answer!r}, got {answer!r}")
    log(f"done after {time.perf_counter() - STARTED:.0f} s")


if __name__ == "__main__":
    main()

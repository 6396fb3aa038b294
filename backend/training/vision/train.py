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
from copy import deepcopy
from pathlib import Path

import torch
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
    parser.add_argument("--recall", type=float, default=2.0, help="weight of the loss on texts")
    parser.add_argument("--replay", type=int, default=8_192, help="tokens of text in a step")
    parser.add_argument("--warm", type=float, default=0.15, help="share with the language frozen")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 5))
    parser.add_argument("--writers", type=int, default=4, help="processes that write texts")
    parser.add_argument("--store", type=int, default=160_000, help="pictures kept on the device")
    parser.add_argument("--cases", type=int, default=2048, help="held-out questions at the end")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=Path, help="folder of a run to go on from")
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
    x = F.pad(model.embed_tokens(ids), (0, 0, 0, ROWS))  # room for those that are not there
    own = torch.arange(len(ids), device=ids.device)
    neighbour = (own - own % BLOCK + (own % BLOCK + 1) % BLOCK).clamp(max=len(ids) - 1)
    steps = torch.arange(ROWS, device=ids.device)
    for which, values in enumerate((features, features[neighbour])):
        begin = places[:, which]
        columns = torch.where(begin >= 0, begin, ids.shape[1])[:, None] + steps
        index = columns[:, :, None].expand_as(values)
        x = x.scatter(1, index, values.to(x.dtype))
    return x[:, :-ROWS]


def mean(values: Tensor, where: Tensor) -> Tensor:
    """Return the mean of the values that a mask marks."""
    weights = where.float()
    return (values * weights).sum() / weights.sum().clamp(min=1)


class Training:
    """Eyes, hints and language model with their optimizer.

    On a GPU a whole step is one CUDA graph: the models are small, and launching their kernels one
    by one takes longer than the kernels.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device, store: Store) -> None:
        torch.manual_seed(args.seed)
        self.args, self.device, self.store = args, device, store
        self.language = language(MODEL).to(device)
        self.teacher = deepcopy(self.language).requires_grad_(False)
        self.eyes = Eyes(TOWER, self.language.embed_tokens.embedding_dim).to(device)
        self.hints = Hints(int(str(TOWER["hidden_size"]))).to(device)
        if args.start:
            self._go_on_from(args.start)
        self.tuned = args.language == "tuned"
        self.language.requires_grad_(self.tuned)
        gpu = device.type == "cuda"
        self.rates = [torch.zeros((), device=device) for _ in range(2)]
        groups = [
            {"params": [*self.eyes.parameters(), *self.hints.parameters()], "lr": self.rates[0]}
        ]
        if self.tuned:
            groups.append({"params": [*self.language.parameters()], "lr": self.rates[1]})
        self.optimizer = torch.optim.AdamW(
            groups, betas=(0.9, 0.98), weight_decay=0.03, fused=gpu, capturable=gpu
        )
        self.hinted = torch.zeros((), device=device)  # the weight of hints
        self.sums = torch.zeros(5, device=device)  # of what steps tell, and of steps
        self._pool = torch.cuda.graph_pool_handle() if gpu else None  # graphs take turns in it
        self._graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, list[Tensor]]] = {}

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

    def set_rates(self, progress: float, step: int) -> None:
        """Set the learning rates and the weight of hints; the language model waits for its share
        of `--warm`."""
        args = self.args
        factor = min(1.0, step / 400) * max(0.01, min(1.0, 1.6 * (1 - progress)) ** 1.5)
        self.rates[0].fill_(args.rate * factor)
        self.rates[1].fill_(args.language_rate * factor if progress >= args.warm else 0.0)
        self.hinted.fill_(0.5 * max(0.0, 1 - progress / HINTED))

    def seen(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the loss; and, to be told, that of the answers, that of the hints and the share of
        answers that are right in every word, (3,)."""
        pictures, ids, rounds, places, shapes, colours, texts = batch
        ids, places, rounds = ids.long(), places.long(), rounds.long()
        patches = self.eyes.vision_model(prepared(pictures))
        features = self.eyes.connector(patches)
        hidden = self.language.hidden(embedded(self.language, ids, places, features))[:, :-1]
        rounds, targets = rounds[:, 1:], ids[:, 1:]
        logits = self.language.logits(hidden)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        answers = mean(losses, rounds.flatten() > 0)
        hints = self.hints(patches, shapes, colours, texts)
        loss = answers + self.hinted * hints
        with torch.no_grad():
            wrong = (logits.argmax(-1) != targets).float()
            asked, bad = (torch.zeros(len(ids), 64, device=ids.device) for _ in range(2))
            asked.scatter_(1, rounds, 1.0)
            bad.scatter_add_(1, rounds, wrong)
            right = 1 - bad[:, 1:].clamp(max=1).sum() / asked[:, 1:].sum()
        return loss, torch.stack((answers.detach(), hints.detach(), right))

    def recalled(self, ids: Tensor, where: Tensor) -> Tensor:
        """Return how far what the language model says to texts is from what it said before."""
        with torch.no_grad():
            before = self.teacher.hidden(self.teacher.embed_tokens(ids))[:, :-1]
            wanted = self.teacher.logits(before).float().log_softmax(-1)
        now = self.language.hidden(self.language.embed_tokens(ids))[:, :-1]
        said = self.language.logits(now).float().log_softmax(-1)
        apart = F.kl_div(said, wanted, log_target=True, reduction="none").sum(-1)
        return mean(apart, where[:, 1:])

    def _step(self, text: list[Tensor]) -> None:
        blocks = max(1, self.args.batch // BLOCK)
        gpu = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=gpu, cache_enabled=False):
            loss, told = self.seen(self.store.batch(blocks))
            recall = torch.zeros((), device=self.device)
            if text:
                recall = self.recalled(*text)
                loss = loss + self.args.recall * recall
        loss.backward()  # type: ignore[no-untyped-call]
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        self.optimizer.step()
        self.sums += torch.cat((told, recall.detach()[None], torch.ones_like(recall)[None]))

    def step(self, text: list[Tensor]) -> None:
        """Take a step; `sums` grows by the losses of answers and hints, the share of right answers,
        the loss on texts and 1."""
        if self.device.type != "cuda":
            self.optimizer.zero_grad(set_to_none=True)
            self._step(text)
            return
        key = tuple(text[0].shape) if text else ()
        if key not in self._graphs:
            self._graphs[key] = self._captured(text)
        graph, held = self._graphs[key]
        for kept, new in zip(held, text, strict=True):
            kept.copy_(new)
        graph.replay()

    def _captured(self, text: list[Tensor]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
        """Return the graph of a step with texts of this shape, and where the texts are read."""
        held = [part.clone() for part in text]
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.optimizer.zero_grad(set_to_none=True)
                self._step(held)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._step(held)
        return graph, held

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
        self._last: list[Tensor] | None = None
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        from batches import batches  # a program of training/demo

        first = 50_000_000 + self._args.seed * 100_000
        for ids, mask in batches(MODEL, first, self._args.replay, self._args.writers):
            self._ready.put((torch.from_numpy(ids.astype("int64")), torch.from_numpy(mask)))

    def batch(self) -> list[Tensor]:
        """Return tokens, and where they are answers; the last ones again where none are ready."""
        try:
            ids, where = self._ready.get(block=self._last is None)
        except queue.Empty:
            pass
        else:
            self._last = [ids.to(self._device), where.to(self._device)]
        if self._last is None:
            raise AssertionError("the first texts were waited for")
        return self._last


def train(args: argparse.Namespace, training: Training, log: Log) -> None:
    """Take steps until the time is up."""
    store = training.store
    blocks = max(1, args.batch // BLOCK)
    texts = Texts(args, training.device) if training.tuned else None
    store.wait(min(4 * blocks, store.capacity))
    asked = cases(min(256, args.cases), "held out", seed=7)
    reserve = min(0.8, args.minutes / 8) * 60
    begun = time.perf_counter()
    room = STARTED + args.minutes * 60 - reserve - begun
    log(f"training for {room:.0f} s")
    told = saved = begun
    for step in range(1, args.steps + 1):
        now = time.perf_counter()
        progress = max((now - begun) / room, step / args.steps)
        if progress >= 1:
            break
        training.set_rates(progress, step)
        training.step(texts.batch() if texts else [])
        if step in (1, 20, 100) or (step % 8 == 0 and now - told > 15):
            loss, hints, right, recall, count = training.sums.tolist()
            log(
                f"{now - STARTED:.0f} s step {step} loss {loss / count:.4f} "
                f"hints {hints / count:.3f} texts {recall / count:.5f} right {right / count:.1%} "
                f"drawn {store.made * BLOCK} shown {step * blocks * BLOCK}"
            )
            training.sums.zero_()
            told = now
        elif step % 8 == 0 and training.device.type == "cuda":
            torch.cuda.synchronize()  # no more than a few steps wait on the device
        if now - saved > 100:
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
        ids, where = texts.batch()
        where = where[:, 1:]
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
        store = Store(max(1, args.store // BLOCK), device)
        training = Training(args, device, store)
        feed.pour(store)
        train(args, training, log)
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

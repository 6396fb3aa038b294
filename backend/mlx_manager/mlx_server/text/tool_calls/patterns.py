"""Regular expressions by which calls of a `ToolFormat` are found, derived from how it writes them.

Models leave markers out, misspell them and put blanks anywhere: the expressions allow for that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import regex

from mlx_manager.mlx_server.formats import (
    JSON,
    KEYWORDS,
    PYTHON_NAME,
    WORD,
    Aside,
    CallForm,
    CallId,
    Json,
    Keywords,
    Maybe,
    Pattern,
    Piece,
    Pieces,
    Tagged,
    ToolFormat,
    Unquoted,
    last_text,
    texts_of,
)

_NAME = rf"(?P<name>{WORD})"
_KEY = r"(?P<key>(?:(?!(?P=quote))[^<>\n])+?)"
_WORD = r"\w+"
_JSON_NAME = r"(?P<name>[^\"\\]{1,128})"
_SEPARATORS = r"[\s,;\[\]}]"
"""Characters between the calls of a list. Some models end a call with one brace too many."""
_TOKEN = regex.compile(r"<[^<>]*>|(?P<blank>\s+)|(?P<sign>[{:])|[^\s{:<]+|<")
_TAG = regex.compile(r"(?P<element>\S+?)(?:\s(?P<attribute>\w+))?=(?P<quote>\"?)")
_FENCE = "```"


@dataclass(frozen=True, slots=True)
class TagPatterns:
    """Expressions for arguments between tags.

    call: the beginning of a call, with the marker that may precede the first. begun: that with what
    follows a call's name. head: the beginning of an argument; group `key` is its name, and group
    `text` or `json` matches if it tells the value's kind. item: what can follow an argument. Group
    `value` matches for another argument, `object` for all of them as JSON, `end` for the end of the
    call, `close` for that of all calls. closing: both ends. wrong: what may be a misspelt end. What
    group `ahead` matches comes after the match.
    end, call_end, close, whole_end: the texts that end a value, a call, all calls, and arguments as
    JSON; `call_end` is "" if `close` ends a call. line: a line feed at either end of a value
    belongs to the markup. also, wrap: as in `Tagged`.
    """

    call: regex.Pattern[str]
    begun: regex.Pattern[str]
    head: regex.Pattern[str]
    item: regex.Pattern[str]
    closing: regex.Pattern[str]
    wrong: regex.Pattern[str]
    end: str
    call_end: str
    close: str
    whole_end: str
    line: bool
    also: tuple[str, ...]
    wrap: tuple[str, str] | None


@dataclass(frozen=True, slots=True)
class CallPatterns:
    """Expressions for calls, from what opened them on.

    item: the text before each call and after the last. It ends in one of these groups:
        object  a `{`: the call is a JSON object that holds its name and its arguments
        args    a `{`: the arguments, as JSON; group `name` is the call's and group `id` may be
        braces  a `{`: the arguments, as an object without quotes; group `name` is the call's
        none    anything, or nothing: the call has no arguments; group `name` is its name
        params  the beginning of arguments between tags; group `name` is the call's
        block   the beginning of calls that are read when they are complete
        close   the end of the calls
    What group `ahead` matches is not part of the item.
    end: the text that ends a call; the output may end before it. close: the text that ends all
    calls. fenced: there may be fences around arguments. name_keys, argument_keys: the keys that the
    name and the arguments may have in a call that is a JSON object, those of the format first;
    models write the usual ones, too. named: such a name after the call's brace. tags: the
    expressions for arguments, if they are between tags. block_end: the text that ends a block; None
    if it ends where its brackets balance.
    """

    item: regex.Pattern[str]
    end: str
    close: str
    fenced: bool
    name_keys: tuple[str, ...]
    argument_keys: tuple[str, ...]
    named: regex.Pattern[str]
    tags: TagPatterns | None
    block_end: str | None


@cache
def patterns_of(form: ToolFormat) -> CallPatterns:
    """Return the expressions for calls in a format."""
    calls = (form.call, *form.also)
    keys = [call.keys for call in (*calls, *filter(None, [form.other])) if call.keys]
    name_keys = _unique(*(key for key, _ in keys), "name")
    closers = _closers(form)
    close = closers[0] if closers else ""
    fenced = any(_FENCE in text for call in calls for text in texts_of(call.tail))
    in_lists = form.bare or any(call.quotes_name for call in calls)
    skipped = [*map(regex.escape, form.skipped), _SEPARATORS if in_lists else r"\s"]
    skipped += map(regex.escape, {mark: 0 for call in calls for mark in _around(form, call)})
    if fenced:
        skipped.append(_FENCE)
    ways = [rf"(?P<close>{_any(closers)})"] if closers else []
    ways += [way for call in calls for way in _beginnings(form, call)]
    return CallPatterns(
        item=_compiled(f"(?:{'|'.join(skipped)})*(?:{'|'.join(ways)})"),
        end=_end(form, form.call),
        close=close,
        fenced=fenced,
        name_keys=name_keys,
        argument_keys=_unique(*(key for _, key in keys), "arguments", "parameters"),
        named=regex.compile(rf"\s*\"{_any(name_keys)}\"\s*:\s*\"{_JSON_NAME}\""),
        tags=_tag_patterns(form, form.call.arguments)
        if isinstance(form.call.arguments, Tagged)
        else None,
        block_end=close if _is_listed(form) else None,
    )


def _is_listed(form: ToolFormat) -> bool:
    """Return whether calls as in Python stand in a list."""
    return form.call.arguments == KEYWORDS and last_text(form.opening).endswith("[")


def _unique(*texts: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


def _compiled(expression: str) -> regex.Pattern[str]:
    return regex.compile(regex.sub(r"(?:\\s\*)+", r"\\s*", expression))


# ---------------------------------------------------------------------------------------------
# Markers
# ---------------------------------------------------------------------------------------------


def _marks(pieces: Pieces) -> list[str]:
    """Return the markers in `pieces`: the words in their texts, less JSON's and Python's signs."""
    words = (word.strip("[](){}`,") for text in texts_of(pieces) for word in text.split())
    return [word for word in words if word and '"' not in word]


def _closers(form: ToolFormat) -> tuple[str, ...]:
    """Return the texts that end calls, the one that is written first."""
    last = form.closing or (() if form.opening else form.call.tail)
    return form.closers or tuple(_marks(last)[-1:])


def _end(form: ToolFormat, call: CallForm) -> str:
    """Return the text that ends a call whose name precedes JSON; "" if there is none."""
    if call.arguments != JSON or call.keys:
        return ""
    closers = _closers(form)
    ends = _marks(call.tail) or ([] if closers else form.openers)
    return next((mark for mark in ends if mark not in closers), "")


def _around(form: ToolFormat, call: CallForm) -> list[str]:
    """Return the markers before the brace of a call that is an object, or after another call."""
    if not call.keys:
        return [end] if (end := _end(form, call)) else []
    first, *_ = texts_of(_after_opener(form, call.head))
    return first.partition("{")[0].split()


def _any(texts: Iterable[str]) -> str:
    return f"(?:{'|'.join(map(regex.escape, texts))})"


def _lenient(pieces: Iterable[Piece]) -> str:
    """Return an expression for `pieces` with blanks or without."""
    found = []
    for piece in pieces:
        match piece:
            case str():
                found += [_lenient_token(token) for token in _TOKEN.finditer(piece)]
            case CallId():
                found.append(r"\s*(?P<id>\w+)\s*")
            case Pattern(expression):
                found.append(f"(?:{expression})")
            case Maybe(inner):
                found.append(rf"(?:{_lenient(inner)}\s*)?")
            case Aside():
                pass
    return "".join(found)


def _lenient_token(token: regex.Match[str]) -> str:
    if token["blank"]:
        return r"\s*"
    return rf"\s*{regex.escape(token[0])}\s*" if token["sign"] else regex.escape(token[0])


def _after_opener(form: ToolFormat, pieces: Pieces) -> Pieces:
    """Return the pieces less the opener that they begin with, which has been read already."""
    match pieces:
        case (str(first), *rest):
            for opener in form.openers:
                if first.startswith(opener) and (not form.opening or opener in form.skipped):
                    return (first.removeprefix(opener), *rest)
    return pieces


# ---------------------------------------------------------------------------------------------
# Beginnings of calls
# ---------------------------------------------------------------------------------------------


def _beginnings(form: ToolFormat, call: CallForm) -> list[str]:
    """Return expressions for the beginning of a call, each of which ends in one of the groups."""
    head = _after_opener(form, call.head)
    match call.arguments:
        case Json():
            return [r"(?P<args>\{)"] if form.message else _in_json(form, call, head)
        case Tagged():
            tag = _call_tag(form)
            return [f"{tag}(?P<params>)" if "=" in tag else rf"{_NAME}\s*(?P<params>(?P<ahead><))"]
        case Unquoted():
            close = _any(_closers(form))
            begin = rf"(?:{_any(form.openers)}\s*)?{_lenient(head)}{_NAME}\s*"
            return [rf"{begin}(?:(?P<braces>(?P<ahead>\{{))|(?P<none>(?P<ahead>{close})))"]
        case Keywords():
            opening = r"\[\s*" if form.bare else ""
            begin = r"\[" if _is_listed(form) else rf"{opening}{PYTHON_NAME}\("
            return [f"(?P<block>{begin})"]


def _in_json(form: ToolFormat, call: CallForm, head: Pieces) -> list[str]:
    """Return expressions for an object, or for a name with its arguments or the call's end."""
    if call.keys:
        return [r"(?P<object>\{)"]
    if form.named_by_id:
        begin = rf"{_lenient(head[:1])}\s*(?P<id>{WORD}?)\s*"
        middle = rf"(?:{_lenient(call.middle[-1:])}\s*)?"
    else:
        begin = _lenient(head) + (_JSON_NAME if call.quotes_name else rf"\s*{_NAME}\s*")
        middle = rf"{_lenient(call.middle)}\s*"
    ways = [rf"{begin}{middle}(?P<args>\{{)"]
    if end := _end(form, call):
        if _FENCE in middle:
            middle = rf"(?:{_FENCE}(?:json)?\s*)*"
        ways.append(rf"{begin}{middle}(?P<none>(?P<ahead>{regex.escape(end)}))")
    return ways


# ---------------------------------------------------------------------------------------------
# Tags
# ---------------------------------------------------------------------------------------------


def _tag_patterns(form: ToolFormat, arguments: Tagged) -> TagPatterns:
    closers = _closers(form)
    call_end = next((mark for mark in _marks(form.call.tail) if mark not in closers), "")
    end = rf"(?P<end>{regex.escape(call_end)})|" if call_end else ""
    closing = rf"{end}(?P<close>{_any(closers)})"
    whole = ""
    if arguments.whole:
        whole = rf"{regex.escape(arguments.whole[0])}[^<]*{_tag_end(arguments.middle)}(?P<object>)|"
    call, head = _call_tag(form), _argument_tag(arguments)
    after = rf"\s*(?:{head}(?P<value>)|{whole}{closing})"
    return TagPatterns(
        call=_compiled(rf"\s*{call}"),
        begun=_compiled(call.replace("(?P<ahead><)", "") + after),
        head=_compiled(head),
        item=_compiled(after),
        closing=_compiled(closing),
        wrong=_compiled(_misspelt(arguments.end.strip())),
        end=arguments.end.strip(),
        call_end=call_end,
        close=closers[0],
        whole_end=arguments.whole[1] if arguments.whole else "",
        line=arguments.end.startswith("\n"),
        also=arguments.also,
        wrap=arguments.wrap,
    )


def _call_tag(form: ToolFormat) -> str:
    """Return an expression for the beginning of a call, up to the first argument."""
    tag = last_text(form.call.head).rpartition("\n")[2]
    if not _TAG.fullmatch(tag):
        return rf"{regex.escape(tag)}\s*{_NAME}\s*(?P<ahead><)"
    before = [opener for opener in form.openers if not tag.startswith(opener)]
    outer = rf"(?:{_any(before)}\s*)?" if before else ""
    return f"{outer}{_tag(tag, _NAME, _tag_end(last_text(form.call.middle)))}"


def _argument_tag(form: Tagged) -> str:
    """Return an expression for all that precedes an argument's value."""
    if _TAG.fullmatch(form.begin):
        kind = ""
        if form.kind:
            attribute, text, other = form.kind
            values = rf"(?P<text>{text})|(?P<json>{other.format(type=_WORD)})"
            kind = rf"(?:\"\s+{attribute}=\"(?:{values}))?"
        return _tag(form.begin, _KEY + kind, _tag_end(form.middle))
    key, value = (name.strip("</>") for name in (form.begin, form.end))
    return (
        rf"(?:<{key}>|<{key}\s)\s*(?P<key>[^<]+?)\s*"
        rf"(?:(?:</{key}>|</?(?:{key}|{value})>?)\s*)?(?:<{value}>|<{value}(?P<ahead>\n))"
    )


def _tag(begin: str, name: str, end: str) -> str:
    """Return an expression for a tag that begins with `begin` and a name, also where a quote or its
    end is missing, and with other attributes.

    name, end: expressions.
    """
    tag = _TAG.fullmatch(begin)
    assert tag is not None
    found = regex.escape(tag["element"])
    if attribute := tag["attribute"]:
        found += rf"\s(?:[^<>]*\s)?{attribute}\s*"
    if end == ">":
        rest = r"[\"']?\s*(?:>|(?P<ahead>\n))|(?P=quote)(?:\s[^<>\n]*>|(?P<ahead>[^\s<>\"']))"
    else:
        rest = rf"(?P=quote)[^<]*{end}"
    return rf"{found}=\s*(?P<quote>[\"'])?{name}(?:{rest})"


def _tag_end(text: str) -> str:
    """Return an expression for the end of a tag that `text` ends with."""
    return str(regex.escape(text.strip().strip('"')))


def _misspelt(end: str) -> str:
    """Return an expression for what may be a misspelt `end`."""
    if end.startswith("</"):
        return r"<\s*[/\\]?[^<>\n]{0,40}(?:>|(?P<ahead>[<\n]))"
    return r"<\|close\|>[^<\n]{0,40}(?:<\|sep\|>|(?P<ahead>\n|<\|(?:open|close)\|>))"

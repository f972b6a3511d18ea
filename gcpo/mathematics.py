r"""Mathematical answers: the answer of a completion, and whether it equals the gold answer.

Math-Verify compares, gold first: its comparison is not symmetric. Before that, answers are read as a careful person
would read them (:func:`read`); two lists, intervals or matrices that it takes for different are compared once more,
entry by entry.

Math-Verify runs in a process of its own (:mod:`gcpo.grader`), which ends when a comparison takes too long.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from gcpo import grader

LONGEST = 2000
"""How many characters an answer may have; a longer one is wrong."""

_BOXED = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # a brace, or an escaped character
_SPACE = r"(?:[\s$,;.~&]|\\[(),;:! \[\]\\]|\\q?quad(?![A-Za-z]))*"
_BETWEEN_BOXES = re.compile(
    rf"{_SPACE}(?:\\(?:text|mathrm|mbox)\{{\s*(?:and|or)\s*\}}|\b(?:and|or)\b)?{_SPACE}"
    rf"(?:[A-Za-z](?:_\{{?\w+\}}?)?\s*=)?{_SPACE}"  # the variable of the next box: x_2 =
)
_DELIMITED = re.compile(r"(?<!\\)\$|\\\(|\\\[")
_COMMAND = re.compile(r"\\[A-Za-z]+(\{[^{}]*\})?")
_PROSE = re.compile(r"[A-Za-z]{2,}\s+[A-Za-z]{2,}")
_INTEGER = re.compile(r"[+-]?[0-9]{1,15}", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)", re.ASCII)
_FRACTION = re.compile(r"-?\\[dt]?frac(\{-?\d{1,15}\}\{\d{1,15}\}|\d\d)", re.ASCII)
_DECIMAL_COMMA = re.compile(r"([+-]?\d+),(\d{1,2}|\d{4,})", re.ASCII)
_PERCENT = re.compile(r"\\?%")
_RATIO = re.compile(r"\d\s*:\s*\d")  # or a time of day
_INTERVAL = re.compile(r"\\infty|^\(.*\]$|^\[.*\)$")  # what is no point
_INEQUALITY = re.compile(r"[<>]|\\[lg](?:eq?|t)(?![A-Za-z])")
# Variables right after a number multiply it. Letters that are rare as variables, such as e, o, s and t, make a word.
_PRODUCT = r"(?!(?:am|pm|nd|rd|cm|dm|km|mm|kn|kw)\b)[abcdkmnpqruvwxyz]{2,}\b"
NUMBERS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen twenty""".split()
_SCALES = {"dozen": 12, "score": 20, "gross": 144, "tens": 10, "hundred": 10**2, "thousand": 10**3, "lakh": 10**5}
_SCALES |= dict.fromkeys("million mln mio mil".split(), 10**6) | {"crore": 10**7, "billion": 10**9, "trillion": 10**12}
_SCALES |= {"milliard": 10**9, "quadrillion": 10**15, "quintillion": 10**18}
_SCALES |= {f"{name}s": scale for name, scale in _SCALES.items() if name not in ("score", "mil")}
_SHORT = {"k": 10**3, "m": 10**6, "mn": 10**6, "b": 10**9, "bn": 10**9, "t": 10**12}
_SCALE = rf"(?:{'|'.join(_SCALES)})(?![a-z])"
_GAP = r"(?:[\s~$*×·]|-(?=[A-Za-z])|\\[,;:!> ]|\\(?:q?quad|enspace|thinspace|times|cdot|rm)(?![A-Za-z]))*+"
_OPENED = rf"(?:(?:\\(?:text|math|mbox|hbox|operatorname|emph)[a-z]*\*?\s*)?[{{(\[]{_GAP})*+"
_TRIGONOMETRY = r"\\(?:sin|cos|tan|cot|sec|csc)\s*[({]?"
_GROUP_OF_DIGITS = r"(?:[ \u00a0\u202f~]|\\[,;:! ]|\{\s?,\s?\}|\\thinspace\s?)"


def _fraction(repeating: re.Match[str]) -> str:
    """The digits of a repeating decimal as a fraction: 0.1 with 6 repeated is (16 - 1) / 90."""
    whole, once, again = repeating.groups()
    above = int(whole + once + again) - int(whole + once or 0)
    return rf"\frac{{{above}}}{{{'9' * len(again) + '0' * len(once)}}}"


def _scaled(found: re.Match[str]) -> str:
    r"""A number times the words after it: 12\text{ million} is 12000000."""
    number, gap, opened, words, closed = found.groups("")
    before, after = found.string[: found.start()].rstrip(), found.string[found.end() :].strip(" .$")
    text = re.search("text|box", opened) and words in ("k", "mn", "bn")  # K and M are units, unless there is money
    letters = words.lower() in _SHORT and not (text or (opened and before.endswith((r"\$", "€", "£"))))
    alone = number.isalpha() or words.lower() in ("gross", "score")  # not one hundred twenty, nor 15 gross pay
    counted = number or re.search(r"[^\W_]\Z|[)}\]%!]\Z" if opened else r"[\d)}\]]\Z", before)
    if letters or (alone and after) or not counted:
        return found[0]
    scale = math.prod((_SCALES | _SHORT)[word] for word in re.findall("[a-z]+", words.lower()))
    amount = Decimal(NUMBERS.index(number.lower()) if number.isalpha() else number.replace(",", "") or 1)
    depth, closed = sum(map(opened.count, _OPENING)), "".join(closed.split())
    rest = closed[depth:] if len(closed) >= depth else opened + closed
    return ("" if number else r" \cdot ") + f"{amount * scale:f}{'$' * gap.count('$')}{rest}"


# How an answer is read: what is found in it, in this order, and what stands for it.
_READINGS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    ("[\u200b\u200c\u200d\u2060\ufeff]", ""),  # nobody sees them
    (r"−|–(?!\d)|(?<!\d)–", "-"),  # a dash between two digits says from, to
    (r"\\(?:underline|textbf|mathbf)(?=\s*\{)", ""),
    (r"(?s)(?<!\\)\$\$(.+?)\$\$|(?<!\\)\\\((.+?)\\\)", lambda found: f"${(found[1] or found[2]).strip()}$"),
    (r"(?<!\\)\$\s*\$", " "),  # where mathematics ends and goes on at once
    (r"^\$(?=[\d.,]+\s?[kKmMbBtT]\Z)", ""),
    (rf"(?a)(?<![\d.])\d{{1,3}}(?:{_GROUP_OF_DIGITS}+\d{{3}})+(?!\d)", lambda found: re.sub(r"\D", "", found[0])),
    (
        rf"(?ai)((?<![\w.,/^!}}])\d+(?:,\d{{3}})*(?:\.\d+)?|^(?:{'|'.join(NUMBERS)})(?![a-z])|(?<![\s~$([{{\\,]))({_GAP})({_OPENED})"
        rf"((?<![a-z\\])(?:{_SCALE}(?:[\s-]+{_SCALE})*|(?:{'|'.join(_SHORT)})(?![a-z])))((?:\s*[)}}\]])*)",
        _scaled,
    ),
    (r"\\\$|\\(?:text|mathrm)\{\s*\\?\$\s*\}|[€£]", ""),
    (r"(?a)(\d*)\.(\d*)\\(?:overline|bar)\{(\d+)\}", _fraction),
    (r"^\s+|\.?\s*\Z", ""),
    (r"\s*percent\b", r"\\%"),
    (r"(?a)(?<![\w.\\])([+-]?\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])", r"\1 \\times 10^{\2}"),
    (rf"({_TRIGONOMETRY})\s*([\d.]+)\s*\^\s*(?:\{{\s*\\circ\s*\}}|\\circ)", r"\1 \\frac{\2 \\pi}{180}"),
    (rf"(?i)^({'|'.join(NUMBERS)})\Z", lambda found: str(NUMBERS.index(found[0].lower()))),
    (r"(?a)^([+-]?)(\d+)\s+(\d+)/(\d+)\Z", r"\1(\2+\\frac{\3}{\4})"),
    (rf"(?a)^([+-]?[\d.,]*\d)(?!{_PRODUCT})\s*(?!pi\b|sqrt\b|mod\b|and\b|or\b)[A-Za-z]{{2,}}\.?\Z", r"\1"),  # a unit
)
_MATRIX = re.compile(r"\\begin\{([pbBvV]?matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}", re.DOTALL)
_SEPARATOR = re.compile(r"\\(?:text|mathrm)\{\s*(?:,?\s*and|,?\s*or)\s*\}|,?\s*\b(?:and|or)\b|;")
_LAYOUT = re.compile(r"\\(left|right|displaystyle|,|;|!| )|(?<!\\)\$|\\[()\[\]](?![A-Za-z])")
# e and I with an index are no numbers: an energy, a current. Its parser knows them by other letters only.
_CONSTANT = re.compile(r"(?<![A-Za-z\\])[eEI](?=_)")
_OTHER_LETTER = {"e": r"\Xi", "i": r"\Theta"}
_WHOSE = re.compile(r"^[A-Za-z](\([a-z]\))?\s*(=|\\in)\s*")  # x =, f(x) =, x \in
_OPENING, _CLOSING = "([{", ")]}"


def boxed_answer(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` with balanced braces, stripped; ``None`` without one or if it is empty.

    Boxes with nothing between them but space, commas, "and", "or" or whose value comes next (``x_2 =``) are one
    answer, their contents joined by commas (those that repeat one before it left out). Escaped braces (``\{``) do not
    count. A box that the end of the text cuts off is passed over.
    """
    starts = {box.end(): box.start() for box in _BOXED.finditer(text)}
    boxes, opened = [], []  # closed boxes: where they begin, and their content
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif brace[0] == "}" and opened and (start := opened.pop()) in starts:
            boxes.append((starts[start], start, brace.start()))
    contents: dict[str, None] = {}  # from the last box to the first
    begins = None  # of the box that was read last
    for outside, start, end in sorted(boxes, reverse=True):
        between = text[end + 1 : begins]  # None: to the end
        if begins is not None and not (end < begins and len(between) <= 60 and _BETWEEN_BOXES.fullmatch(between)):
            break  # boxes further apart are answers of their own
        content = text[start:end].strip()
        if not (content or contents):  # the last box is empty
            return None
        contents.setdefault(content)
        begins = outside
    return ", ".join(filter(None, reversed(contents))) or None


def read(answer: str) -> str:
    r"""Return an answer in the form that is compared: no currency signs, ``10 000`` and ``10\,000`` as 10000, ``3e-4``
    as a power of ten, ``3 1/2`` as a sum, ``0.\overline{3}`` as a fraction, ``5 dozen`` as 60, ``5\text{ million}`` as
    5000000, ``twelve`` as 12, and a number that is followed by another word without it; ``2xy`` is a product."""
    for found, stands_for in _READINGS:
        answer = re.sub(found, stands_for, answer)
    return answer


def read_gold(gold: str) -> str:
    """Return a gold answer in the form that is compared.

    Raises ``ValueError`` for one that no answer can equal, as it is longer than :data:`LONGEST` or Math-Verify cannot
    read it, and ``RuntimeError`` where Math-Verify cannot start.
    """
    expected = _answer_text(gold)
    if (length := len(expected)) > LONGEST or not _known(expected):
        why = f"has {length} characters, {LONGEST} at most" if length > LONGEST else "cannot be parsed by Math-Verify"
        raise ValueError(f"gold answer {gold[:99]!r} {why}: repair the row or leave it out")
    return expected


def math_correct(prediction: str | None, gold: str, *, absolute: float = 0.0, relative: float = 0.0) -> float:
    r"""1.0 if the prediction equals the gold answer, else 0.0 (``None``: 0.0).

    Both may be a bare answer (``9``, ``\frac{1}{2}``), one in ``$...$``, or a text with a ``\boxed{...}``, of which the
    last counts, or the last few that stand side by side. In prose without a box Math-Verify's own extraction decides,
    which ends at the last number; a task that wants boxed answers only passes ``boxed_answer(completion)``.

    - Math-Verify compares numbers after rounding to 6 decimals (a gold number below 0.001: to 6 digits), and
      accepts ``0.1`` for ``10\%``. Expressions it cannot read are compared as strings. A percent sign may be left out:
      ``10`` is right too.
    - Lists without brackets or in braces are sets: any order, as many entries. Tuples, intervals and matrices are
      compared entry by entry, with their brackets. An answer that says two things is not one of them.
    - Where the gold answer is a decimal number of two or more places, a number that rounds to it there is right; not
      the other way round: ``0.33`` is not ``1/3``.
    - ``3,14`` is a decimal number where the gold answer is one number.
    - A number is right within ``absolute`` of the gold number, or within ``relative`` times it (both 0 or above), for
      benchmarks that state a tolerance.

    An answer of more than :data:`LONGEST` characters, or that takes longer than :data:`gcpo.grader.SECONDS`, counts as
    wrong.

    Raises as :func:`read_gold`.
    """
    expected = read_gold(gold)
    if prediction is None or len(answer := _answer_text(prediction)) > LONGEST:
        return 0.0
    return float(_right(expected, answer, absolute, relative))


def same_answer(first: str, second: str) -> bool:
    """Return True for equal strings, and for answers that Math-Verify finds equal with either as the gold answer.

    Symmetric, unlike Math-Verify's own comparison. Raises ``RuntimeError`` if Math-Verify cannot start.
    """
    first, second = _answer_text(first), _answer_text(second)
    if first == second or max(len(first), len(second)) > LONGEST:
        return first == second
    return _equal(first, second) and _equal(second, first)


def _answer_text(text: str) -> str:
    """Return the content of the last box, or the whole text without a box, as :func:`read` gives it."""
    if _BOXED.search(text):
        text = boxed_answer(text) or ""
    return read(text.strip()) if len(text) <= LONGEST else text


def _right(gold: str, answer: str, absolute: float, relative: float) -> bool:
    number = _NUMBER.fullmatch(_bare(gold))
    if number and (comma := _DECIMAL_COMMA.fullmatch(answer)):
        answer = f"{comma[1]}.{comma[2]}"
    if _RATIO.search(answer) and ":" not in gold:
        return False
    interval = _INTERVAL.search(_bare(gold)) and _INEQUALITY.search(answer)
    if _equal(gold, answer) or (interval and _equal(answer, gold)):
        return True
    if "%" in gold + answer:
        return _right(_PERCENT.sub("", gold), _PERCENT.sub("", answer), absolute, relative)
    parts, own = _parts(gold), _parts(answer)
    if parts and own and parts[0] == own[0] and len(parts[1]) == len(own[1]) > 1:

        def same(part: str, other: str) -> bool:
            return bool(part and other) and _right(read(part), read(other), absolute, relative)

        return _matched(parts[1], own[1], same) if parts[0] == "set" else all(map(same, parts[1], own[1]))
    places = len(number[0].partition(".")[2]) if number else 0
    allowed = max(absolute, 0.5000001 * 10.0**-places if places > 1 else 0.0)
    if not (allowed or relative) or (own and own[0] == "set"):
        return False
    expected, found = _value(gold), _value(answer)
    if expected is None or found is None:
        return False
    return abs(found - expected) <= max(allowed, relative * abs(expected))


def _matched(parts: list[str], answers: list[str], same: Callable[[str, str], bool]) -> bool:
    """Return True if each entry of a set can be paired with an entry of the answer."""
    left = list(answers)
    for part in parts:
        if (found := next((answer for answer in left if same(part, answer)), None)) is None:
            return False
        left.remove(found)
    return True


def _bare(answer: str) -> str:
    r"""Return an answer without dollars, size commands and the name of its variable (``x =``)."""
    return _WHOSE.sub("", _LAYOUT.sub("", answer).strip())


def _parts(answer: str) -> tuple[str, list[str]] | None:
    """An answer's kind ("set", a pair of brackets, or the shape of a matrix) and its entries; None for one thing."""
    if matrix := _MATRIX.search(answer):
        rows = [[cell.strip() for cell in row.split("&")] for row in matrix[2].split(r"\\") if row.strip()]
        return f"matrix {[len(row) for row in rows]}", [cell for row in rows for cell in row]
    answer = _bare(_SEPARATOR.sub(",", answer))
    braces = answer.startswith(r"\{") and answer.endswith(r"\}")
    outer = _split(answer[2:-2] if braces else answer)
    if braces or len(outer) > 1:
        return "set", [_bare(part) for part in outer]
    if answer[:1] in ("(", "[") and answer[-1:] in (")", "]"):
        return answer[0] + answer[-1], _split(answer[1:-1])
    return None


def _split(text: str) -> list[str]:
    """Return the parts of a text between commas that stand outside of brackets."""
    parts, depth, begin = [], 0, 0
    for place, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if character == "," and depth <= 0:
            parts.append(text[begin:place])
            begin = place + 1
    return [part.strip() for part in [*parts, text[begin:]]]


# --- Math-Verify, in a process of its own -------------------------------------------------------------------------


@functools.lru_cache(maxsize=100_000)
def _equal(gold: str, answer: str) -> bool:
    whole = _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(answer)
    return int(gold) == int(answer) if whole else bool(_ask("equal", gold, answer))


@functools.lru_cache(maxsize=20_000)
def _known(gold: str) -> bool:
    """Return True for what Math-Verify reads; most gold answers are numbers, which it need not start for."""
    return bool(_NUMBER.fullmatch(gold) or _FRACTION.fullmatch(gold) or _ask("known", gold))


@functools.lru_cache(maxsize=20_000)
def _value(answer: str) -> float | None:
    return float(bare) if _NUMBER.fullmatch(bare := _bare(answer)) else _ask("value", answer)


_ask = grader.GraderProcess().ask


def _reader() -> Callable[[str], list[Any]]:
    """Return the cached function from an answer to Math-Verify's readings of it."""
    import math_verify  # slow to import
    from sympy import I, Symbol

    read_all = functools.partial(math_verify.parse, parsing_timeout=None)
    read_latex = functools.partial(read_all, extraction_config=[math_verify.LatexExtractionConfig()])

    @functools.lru_cache(maxsize=20_000)
    def parse(answer: str) -> list[Any]:
        answer = _CONSTANT.sub(lambda found: _OTHER_LETTER[found[0].lower()], answer)
        answer = answer.replace(r"\varnothing", r"\emptyset")
        prose = _PROSE.search(_COMMAND.sub("", answer))
        if not (prose or _DELIMITED.search(answer)):  # \frac{1}{2} or 2x+1 is only read as mathematics inside a box
            answer = f"\\boxed{{{answer.rstrip('. ')}}}"
        found = list(map(real, read_all(answer)))
        if "\\" in answer and not prose and all(isinstance(part, str) for part in read_latex(answer)):
            # unreadable mathematics: Math-Verify would take the last number in it
            found = [part for part in found if isinstance(part, str)]
        return found

    def real(part: Any) -> Any:
        """With symbols that are real: where i is among them it takes them for complex, and they differ from others."""
        symbols = getattr(part, "free_symbols", ())
        others = {symbol: Symbol(symbol.name, real=True) for symbol in symbols if symbol.is_real is False}
        others |= {symbol: I for symbol in symbols if symbol.name == "i"}
        return part.xreplace(others) if others else part

    return parse


def _differ(first: Any, second: Any) -> bool:
    """Return True if two expressions in the same letters differ at one point: simplifying takes seconds."""
    from sympy import Expr, N, Rational

    if not (isinstance(first, Expr) and isinstance(second, Expr)):
        return False
    names, others = (sorted({symbol.name for symbol in part.free_symbols}) for part in (first, second))
    if not names or names != others:
        return False
    place = {name: Rational(7 * number + 5, 11) for number, name in enumerate(names)}
    with contextlib.suppress(TypeError, ValueError, ArithmeticError, AttributeError):
        values = [complex(N(part.subs({s: place[s.name] for s in part.free_symbols}))) for part in (first, second)]
        return abs(values[0] - values[1]) > 1e-6 * max(map(abs, values))
    return False


def serve() -> None:
    """Answer the questions of :func:`_ask`, in a process of its own."""
    import math_verify  # slow to import
    from sympy import N

    grader.limit_memory()
    parse = _reader()

    def value(answer: str) -> float | None:
        for found in parse(answer):
            with contextlib.suppress(TypeError, ValueError, AttributeError):
                return float(N(getattr(found, "rhs", found)))
        return None

    def equal(gold: str, answer: str) -> bool:
        expected_parts, parts = parse(gold), parse(answer)
        if any(map(_differ, expected_parts[:1], parts)):
            return False
        if not math_verify.verify(expected_parts, parts, timeout_seconds=None):
            return False
        expected = value(gold) or 0.0
        if "%" in gold or not 0 < abs(expected) < 1e-3:
            return True
        found = value(answer)  # to 6 decimals, all small numbers are equal
        return found is not None and abs(found - expected) <= 1e-6 * abs(expected)

    equal(r"\frac{1}{2}", "x+1")  # loads the parser, so that no answer is charged for it
    grader.serve({"known": lambda gold: bool(parse(gold)), "equal": equal, "value": value})

"""Generate numbers by random schemas: each must fit its schema exactly as it is spelled.

    python -m tests.server.fuzz_numbers --minutes 1 --seed 0

A schema contains numbers at the limits of integers and of float64, as constants, bounds and
multiples, both in a request's body and parsed by Python. Either it is rejected with the name of its
key, or the grammar is compared with exact arithmetic: a random text of the form must fit the
schema, and of the numbers near its bounds, exactly those that fit must be allowed.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import random
import sys
import time
from decimal import Decimal
from fractions import Fraction

from transformer_jax.decoding.structured import Grammar
from transformer_jax.server.protocol import RequestError, read_request
from transformer_jax.tokenizers.trained import ByteTokenizer

EDGES = (
    "0", "-0", "0.0", "-0.0", "1", "-1", "0.1", "1e0", "1E+2", "-10e-1", "9007199254740991.0",
    "123456789.12345679", "0.30000000000000004", "1e308", "1e-320", "1e400", "1e-400", "5e-324",
    "1.7976931348623157e308", "1e22", "1e-22", "1e-23", "1e99999999999999999999",
    "1e-99999999999999999999",
)  # fmt: skip
BOUNDS = "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"
REFUSED = "must", "multipleOf", "number", "Unsatisfiable", "no text"


def number(rng: random.Random) -> str:
    """Return a random number as JSON text."""
    match rng.randrange(6):
        case 0:
            return rng.choice(EDGES)
        case 1:
            base, most = rng.choice([(2, 70), (10, 22)])
            return str(rng.choice([1, -1]) * base ** rng.randrange(most) + rng.randrange(-2, 3))
        case 2 | 3:
            return str(rng.randrange(-120, 120))
        case 4:
            digits = rng.randrange(10 ** rng.randrange(1, 18))
            return f"{rng.choice(['', '-'])}{digits}e{rng.randrange(-25, 10)}"
        case _:
            return str(Decimal(rng.randrange(-3000, 3000)).scaleb(-rng.randrange(4)))


def schema(rng: random.Random) -> dict:
    """Return a schema whose numbers are strings that begin with "#"."""

    def one() -> str:
        return "#" + number(rng)

    kind = rng.randrange(4)
    if kind == 0:
        found: dict = {"const": one()}
    elif kind == 1:
        found = {"enum": [one() for _ in range(rng.randrange(1, 4))]}
    else:
        found = {"type": rng.choice(["integer", "number"])}
        for name in rng.sample(BOUNDS, rng.randrange(1, 4)):
            found[name] = one()
        if rng.random() < 0.3:
            found["multipleOf"] = rng.choice(
                ["#3", "#0.5", "#0.01", "#7", "#4093", "#65537", one()]
            )
    if rng.random() < 0.3 and len(found) > 1:
        key = rng.choice([*found])
        rest = {name: value for name, value in found.items() if name != key}
        found = {"allOf": [{key: found[key]}, rest | rng.choice([{}, {"multipleOf": "#2"}])]}
        found = {"type": "number"} | found
    return found


def spelled(found: dict) -> str:
    """Return the JSON of a schema."""
    text = json.dumps(found)
    for part in set(text.split('"')):
        if part.startswith("#"):
            text = text.replace(f'"{part}"', part[1:])
    return text


def fits(x: Decimal, found: dict) -> bool:
    """Whether a number satisfies a schema, by exact arithmetic."""

    def value(text: str) -> Fraction:
        return Fraction(Decimal(text[1:]))

    number = Fraction(x)
    for key, limit in found.items():
        match key:
            case "const":
                ok = number == value(limit)
            case "enum":
                ok = any(number == value(one) for one in limit)
            case "type":
                ok = limit == "number" or number.denominator == 1
            case "minimum":
                ok = number >= value(limit)
            case "maximum":
                ok = number <= value(limit)
            case "exclusiveMinimum":
                ok = number > value(limit)
            case "exclusiveMaximum":
                ok = number < value(limit)
            case "multipleOf":
                ok = (number / value(limit)).denominator == 1
            case "allOf":
                ok = all(fits(x, one) for one in limit)
        if not ok:
            return False
    return True


def named(found: object) -> list[str]:
    """Return the numbers in a schema."""
    if isinstance(found, dict):
        found = [*found.values()]
    if isinstance(found, list):
        return [text for one in found for text in named(one)]
    return [found[1:]] if isinstance(found, str) and found.startswith("#") else []


def near(found: dict, rng: random.Random) -> set[str]:
    """Return numbers near those of a schema, each in its shortest spelling."""
    numbers = {Decimal(text) for text in named(found)} | {Decimal(rng.randrange(-40, 40))}
    for x in [*numbers]:
        places = max(0, -int(x.as_tuple().exponent))
        steps = {Decimal(1), Decimal("0.5"), Decimal(1).scaleb(-places - 1), Decimal(2**30)}
        numbers |= {y for step in steps for y in (x + step, x - step)}
    plain = (f"{x:f}" for x in numbers)
    return {(x.rstrip("0").rstrip(".") if "." in x else x) for x in plain} - {"-0"}


def allowed(grammar: Grammar, text: str) -> bool:
    """Whether a text satisfies a form."""
    matcher = grammar.start()
    for byte in text.encode():
        if not matcher.allowed[byte]:
            return False
        matcher.read(byte)
    return bool(matcher.allowed[256])


def walked(grammar: Grammar, rng: random.Random) -> str | None:
    """Return a random text of a form, or None if it does not end within 60 bytes."""
    matcher, text = grammar.start(), bytearray()
    while len(text) < 60:
        if matcher.allowed[256] and (matcher.ended or rng.random() < 0.2):
            return text.decode()
        text.append(rng.choice([int(i) for i in matcher.allowed[:256].nonzero()[0]]))
        matcher.read(text[-1])
    return None


def faults(found: dict, rng: random.Random) -> tuple[str, list[str]]:
    """Return the outcome of a schema and its faults."""
    text = spelled(found)
    body = f'{{"model": "m", "prompt": "", "structured_outputs": {{"json": {text}}}}}'
    try:
        form = read_request("completion", body.encode(), "m").form
        assert form is not None
        of_body = Grammar("schema", form.content, ByteTokenizer(), 257, (256,))
    except (RequestError, ValueError) as error:
        clear = any(word in str(error) for word in REFUSED) and "\n" not in str(error)
        return "refused", [] if clear else [f"{text}: {error}"]
    wrong = []
    if not all(math.isfinite(float(x)) for x in named(found)):
        return "written", [f"{text}: an infinite number is not refused"]
    of_python = Grammar("schema", json.loads(text), ByteTokenizer(), 257, (256,))
    for what, grammar in (("a body", of_body), ("Python", of_python)):
        for _ in range(4):
            written = walked(grammar, rng)
            if written is not None and not fits(Decimal(written), found):
                wrong.append(f"{text}, of {what}: {written} is written")
        exact = "const" in text or "enum" in text
        for x in near(found, rng):
            want = fits(Decimal(x), found)
            # with the minimum -1.56, llguidance allows -1.50 but not -1.5
            zeros = "0" * 3 if want and "." in x else ""
            found_in = any(allowed(grammar, x + zeros[:n]) for n in range(len(zeros) + 1))
            if found_in != want and not (exact and want and x not in named(found)):
                wrong.append(f"{text}, of {what}: {x} is {'not ' * want}allowed")
    return "written", wrong


def fuzz(seed: int, cases: int | None = None, minutes: float = 1.0):
    """Run cases, and return the outcomes and the faults."""
    seen, wrong, until = collections.Counter(), [], time.monotonic() + 60 * minutes
    while (seen.total() < cases) if cases else (time.monotonic() < until):
        rng = random.Random(f"{seed} {seen.total()}")
        case = schema(rng)
        try:
            became, found = faults(case, rng)
        except ValueError as error:
            became, found = "failed", [f"{spelled(case)}: {error}"]
        wrong += [f"seed {seed}, case {seen.total()}: {one}" for one in found]
        seen[became] += 1
    return seen, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    seen, wrong = fuzz(options.seed, minutes=options.minutes)
    print("\n".join(wrong[:50]))
    print(f"{seen.total()} schemas of seed {options.seed}: {len(wrong)} wrong;", dict(seen))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

"""tests/coverage.py: tables of what tests took. Used by tests/coverage.sh and tests/lua-coverage.sh.

rust JSON LCOV     of the branches and lines that `llvm-cov export` found, those of src/logic without its tests
instrument DIR     changes the scripts in DIR: each condition, and each left side of `and` and `or`, tells the server's log
                   what it was, once in each execution
lua DIR LOG...     what the logs do not tell: conditions of the (unchanged) scripts in DIR that were never true or never
                   false
"""

import collections
import json
import pathlib
import re
import sys

TOKEN = re.compile(
    r"(?P<skip>\s+|--\[\[.*?\]\]|--[^\n]*)|(?P<text>'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\")"
    r"|(?P<number>\d[\w.]*)|(?P<name>[A-Za-z_]\w*)|(?P<sign>\.\.\.|\.\.|[=~<>]=|.)",
    re.S,
)
MARK = (
    "local __told = {} local function __C(id, v) local told = id .. (v and 'T' or 'F') "
    "if not __told[told] then __told[told] = true redis.log(redis.LOG_WARNING, '@' .. told .. '@') end return v end "
)
# What stands before an expression, or between its operands.
BEFORE = {"and", "or", ",", ";", "=", "return", "if", "elseif", "while", "until"}


def tokens(text):
    return [(m.group(), m.start(), m.end(), m.lastgroup) for m in TOKEN.finditer(text) if m.lastgroup != "skip"]


def begin(all, i, first=0):
    """The index of the first token of the operand whose last token is before all[i]."""
    depth = 0
    for j in range(i - 1, first - 1, -1):
        word = all[j][0]
        if word in (")", "]", "}"):
            depth += 1
        elif word in ("(", "[", "{"):
            if depth == 0:
                return j + 1
            depth -= 1
        elif depth == 0 and word in BEFORE:
            return j + 1
    return first


def never_false(operand):
    """A text, a number, a table, or what is joined or shown as text."""
    word, kind = operand[0][0], operand[0][3]
    joined = any(t[0] == ".." for t in operand) and not any(t[0] in ("==", "~=") for t in operand)
    return kind in ("text", "number") or word in ("{", "int", "true") or joined


def conditions(text):
    """(begin, end) of each condition in the text."""
    all, found = tokens(text), set()
    deciding = set()
    for i, (word, *_) in enumerate(all):
        if word in ("if", "elseif", "while"):
            deciding.update(range(i, next(j for j in range(i, len(all)) if all[j][0] in ("then", "do"))))
    for i, (word, *_) in enumerate(all):
        if word in ("and", "or"):
            first = begin(all, i)
            operand = all[first:i]
            # In `a and b or c` b is a value, unless it compares something, or decides about a step.
            chosen = word == "or" and all[first - 1][0] == "and" and i not in deciding
            if chosen and not any(t[0] in ("==", "~=", "<", ">", "<=", ">=", "not") for t in operand):
                continue
        elif word in ("if", "elseif", "while"):
            end = next(j for j in range(i, len(all)) if all[j][0] in ("then", "do"))
            operand = all[begin(all, end, i + 1) : end]
        else:
            continue
        if not never_false(operand):
            found.add((operand[0][1], operand[-1][2]))
    return sorted(found)


def scripts(folder):
    folder = pathlib.Path(folder)
    for path in sorted(folder.rglob("*.lua")):
        yield path, str(path.relative_to(folder)), path.read_text()


def instrument(folder):
    for path, name, text in scripts(folder):
        put = []
        for start, end in conditions(text):
            put.append((start, 1, -end, f"__C('{name}:{start}:{end}:', "))
            put.append((end, 0, -start, ")"))
        out, done = [MARK], 0
        for at, _, _, what in sorted(put):
            out += [text[done:at], what]
            done = at
        path.write_text("".join(out) + text[done:])


def rust(export, lcov):
    root = pathlib.Path("src/logic").resolve()
    tests, ends = set(), {}
    for path in root.rglob("*.rs"):
        text = path.read_text()
        for module in re.findall(r"^#\[cfg\(test\)\]\nmod (\w+);", text, re.M):
            tests.add(path.with_suffix("") / f"{module}.rs")
        begin = re.search(r"^#\[cfg\(test\)\]\n(pub\(\S+\) )?mod \w+ \{", text, re.M)
        ends[path] = text.count("\n", 0, begin.start()) + 1 if begin else 10**9

    def counts(path, line):
        return path in ends and path not in tests and line < ends[path]

    branches, lines = collections.defaultdict(lambda: [0, 0]), {}
    for file in json.load(open(export))["data"][0]["files"]:
        path = pathlib.Path(file["filename"])
        for line, column, to_line, to_column, true, false, *_ in file["branches"]:
            if counts(path, line):
                # A generic function is there once for each type.
                both = branches[path, line, column, to_line, to_column]
                both[0] += true
                both[1] += false
    for record in open(lcov):
        kind, _, value = record.strip().partition(":")
        if kind == "SF":
            path = pathlib.Path(value)
        elif kind == "DA":
            line, count = map(int, value.split(",")[:2])
            if counts(path, line):
                lines[path, line] = lines.get((path, line), 0) + count
    left = []
    for (path, line, column, to_line, to_column), (true, false) in sorted(branches.items()):
        source = path.read_text().splitlines()[line - 1 : to_line]
        source[-1] = source[-1][: to_column - 1]
        what = " ".join("\n".join(source)[column - 1 :].split())
        if what == "true":
            continue  # a rule without a condition of its own
        for was, count in (("true", true), ("false", false)):
            if count == 0:
                left.append(f"src/logic/{path.relative_to(root)}:{line}: never {was}: {what}")
    for (path, line), count in sorted(lines.items()):
        if count == 0:
            left.append(f"src/logic/{path.relative_to(root)}:{line}: never run: {path.read_text().splitlines()[line - 1].strip()}")
    print("\n".join(left))
    rows = []
    for path in sorted(ends):
        if path not in tests:
            both = [count for (of, *_), counts in branches.items() if of == path for count in counts]
            run = [count for (of, _), count in lines.items() if of == path]
            rows.append((str(path.relative_to(root)), len(run), sum(map(bool, run)), len(both), sum(map(bool, both))))
    table("src/logic/", ["lines", "branches"], rows)


def table(of, kinds, rows):
    """rows: a name, and for each kind how many there are, and how many were taken."""
    rows.append(("all", *(sum(row[i] for row in rows) for i in range(1, 1 + 2 * len(kinds)))))
    print(f"\n{of:26}" + "".join(f"{kind:>10}{'not taken':>11}{'taken':>8}" for kind in kinds))
    for name, *numbers in rows:
        pairs = zip(numbers[::2], numbers[1::2])
        print(f"{name:26}" + "".join(f"{all:10}{all - taken:11}{100 * taken / max(all, 1):7.1f}%" for all, taken in pairs))


def lua(folder, logs):
    told = set()
    for log in logs:
        with open(log, errors="replace") as lines:
            told.update(m for line in lines for m in re.findall(r"@(\S+:[TF])@", line))
    rows, left = [], []
    for _, name, text in scripts(folder):
        taken = 0
        both = conditions(text)
        for start, end in both:
            for side, was in (("T", "true"), ("F", "false")):
                if f"{name}:{start}:{end}:{side}" in told:
                    taken += 1
                else:
                    line = text.count("\n", 0, start) + 1
                    left.append(f"lua/{name}:{line}: never {was}: {' '.join(text[start:end].split())}")
        rows.append((name, 2 * len(both), taken))
    print("\n".join(left))
    table("lua/", ["branches"], rows)


match sys.argv[1:]:
    case ["rust", export, lcov]:
        rust(export, lcov)
    case ["instrument", folder]:
        instrument(folder)
    case ["lua", folder, *logs]:
        lua(folder, logs)

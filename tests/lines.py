#!/usr/bin/env python3
"""Counts the lines of code, without blanks and comments, and fails if there are more than LIMITS says: whoever adds
beyond that takes something away first. After a change that takes much away, lower the limits.

product: what users run; tests: everything else that is code; pages: bytes of the documentation."""
import os, pathlib, re, sys

LIMITS = {"product": 55_300, "tests": 63_900, "pages": 155_000}

COMMENT = {".lua": "--", ".py": "#", ".sh": "#", ".html": "<!--", ".css": ("/*", "*")}
FOR_TESTS = re.compile(r"#!?\[cfg\((?:all\(|any\()*\s*(?:test\b|fuzzing|feature = \"daemon\", (?:any\()?test\b)")
MODULE = re.compile(r"(?:pub(?:\([^)]*\))? )?mod (\w+);")
root = pathlib.Path(__file__).parent.parent
KINDS = (".rs", ".lua", ".js", ".mjs", ".css", ".html", ".py", ".c", ".sh", ".md")
text = {}
for folder, folders, names in os.walk(root):
    folders[:] = [f for f in folders if f not in ("target", ".git")]
    for path in (pathlib.Path(folder, name) for name in names):
        if path.suffix in KINDS and not path.is_symlink():
            text[path.relative_to(root)] = path.read_text()


def count(path, lines):
    mark = COMMENT.get(path.suffix, ("//", "/*", "*") if path.suffix in (".js", ".mjs", ".c") else "//")
    return sum(1 for line in lines if line.strip() and not line.strip().startswith(mark))


def parts(path):
    """The lines of a Rust file that users run, those of its tests, and the files that only tests have."""
    lines, product, tests, modules = text[path].splitlines(), [], [], []
    i = 0
    while i < len(lines):
        end = i + 1
        if FOR_TESTS.match(lines[i].strip()):
            while lines[end].strip().startswith("#["):
                end += 1
            if module := MODULE.match(lines[end].strip()):
                folder = path.parent if path.name in ("lib.rs", "main.rs", "mod.rs") else path.with_suffix("")
                named = re.search(r'path = "([^"]+)"', "".join(lines[i:end]))
                modules.append(path.parent / named[1][:-3] if named else folder / module[1])
            elif not lines[i].startswith(" ") and not lines[end].rstrip().endswith(";"):
                while lines[end] != "}":
                    end += 1
                end += 1
                tests += lines[i:end]
                i = end
                continue
        product += lines[i:i + 1]
        i += 1
    return product, tests, modules


rust = {path: parts(path) for path in text if path.suffix == ".rs"}
for_tests = {module for _, _, modules in rust.values() for module in modules}
counted = dict.fromkeys(LIMITS, 0)
for path in text:
    of_tests = path.suffix in (".py", ".c", ".sh", ".mjs") or path.parts[0] in ("tests", "benches", "fuzz", "examples") \
        or any(path.with_suffix("") == m or m in path.parents for m in for_tests)
    if path.suffix == ".md":
        if len(path.parts) == 1 or path.parts[0] == "docs":
            counted["pages"] += len(text[path].encode())
    elif "vendor" not in path.parts:
        product, tests, _ = rust.get(path, (text[path].splitlines(), [], []))
        counted["tests" if of_tests else "product"] += count(path, product)
        counted["tests"] += count(path, tests)
for what, n in counted.items():
    print(f"{what:8} {n:7,} of at most {LIMITS[what]:,}")
if any(counted[what] > LIMITS[what] for what in LIMITS):
    sys.exit("tests/lines.py: more than LIMITS allows: take something away first")

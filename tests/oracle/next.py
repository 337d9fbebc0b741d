#!/usr/bin/env python3
"""When would Vixie cron have run this? An oracle that shares nothing with soloist but the question.

Reads a JSON list of {"zone", "pattern", "from" (Unix seconds), "n", "until" (Unix seconds)} from stdin and prints
a JSON list of the same length: {"times": [Unix seconds], "offsets": [[Unix seconds, offset in seconds], ...]}, or null
for a zone that this machine does not know. "times" are the first n occurrences in [from, until). "offsets" are those of
the zone at "from" and after each change up to "until": whoever compares must leave out the cases where its own zone data
disagrees, because a difference there is a difference of tzdata versions and not of schedules.

Patterns have five fields, or six with seconds first, of numbers, `*`, ranges, steps and lists. Only the standard library
and the system's tzdata are used. Time passes minute by minute, as in the main loop of ISC cron.
"""

import json
import sys
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

EPOCH = datetime(1970, 1, 1)
LIMITS = [(0, 59), (0, 59), (0, 23), (1, 31), (1, 12), (0, 7)]


class Pattern:
    def __init__(self, text):
        fields = text.split()
        if len(fields) == 5:
            fields.insert(0, "0")
        self.sets = [self.values(field, *limits) for field, limits in zip(fields, LIMITS, strict=True)]
        self.seconds = sorted(self.sets[0])
        self.star_day = fields[3][0] == "*" or fields[5][0] == "*"
        self.wild = fields[1][0] == "*" or fields[2][0] == "*"

    @staticmethod
    def values(field, low, high):
        found = set()
        for item in field.split(","):
            span, _, step = item.partition("/")
            if span == "*":
                first, last = low, high
            else:
                first, _, last = span.partition("-")
                last = last or first
            found.update(range(int(first), int(last) + 1, int(step or 1)))
        return found

    def matches(self, local_minute):
        """local_minute: minutes that a wall clock shows, counted from 1970."""
        if local_minute % 60 not in self.sets[1] or local_minute // 60 % 24 not in self.sets[2]:
            return False
        day = EPOCH + timedelta(minutes=local_minute)
        if day.month not in self.sets[4]:
            return False
        weekday = day.isoweekday()  # Sunday is 7
        by_weekday = weekday in self.sets[5] or (weekday == 7 and 0 in self.sets[5])
        by_date = day.day in self.sets[3]
        return (by_date and by_weekday) if self.star_day else (by_date or by_weekday)


def offset(zone, at):
    return int(datetime.fromtimestamp(at, zone).utcoffset().total_seconds())


def offsets(zone, start, end):
    """Offset of every quarter of an hour, by minute where it changes within one; and the changes."""
    by_minute, changes, shown = [], [], None
    for quarter in range(start, end, 900):
        first, last = offset(zone, quarter), offset(zone, quarter + 899)
        for minute in range(quarter, min(quarter + 900, end), 60):
            now = first if first == last else offset(zone, minute)
            if now != shown:
                changes.append([minute, now])
                shown = now
            by_minute.append(now)
    return by_minute, changes


def occurrences(pattern, by_minute, start, count):
    """ISC cron's main loop. The virtual clock follows the wall clock; the distance says what happened to the latter."""
    due = []
    virtual = (start + by_minute[0]) // 60 - 1
    for index, off in enumerate(by_minute):
        at = start + index * 60
        now = (at + off) // 60
        difference = now - virtual
        here = late = False
        if difference == 1 or difference > 180 or difference < -180:
            virtual = now
            here = pattern.matches(now)
        elif 1 < difference <= 5:
            for minute in range(virtual + 1, now):
                late = late or pattern.matches(minute)
            virtual = now
            here = pattern.matches(now)
        elif difference > 5:
            if pattern.wild:
                here = pattern.matches(now)
            else:
                for minute in range(virtual + 1, now):
                    late = late or pattern.matches(minute)
                here = pattern.matches(now)
            virtual = now
        elif pattern.wild:
            here = pattern.matches(now)
        found = {at} if late else set()
        if here:
            found.update(at + second for second in pattern.seconds)
        due.extend(sorted(found))
        if len(due) >= count:
            break
    return due[:count]


def main():
    answers, cache = [], {}
    for case in json.load(sys.stdin):
        key = (case["zone"], case["from"], case["until"])
        if key not in cache:
            try:
                cache[key] = offsets(ZoneInfo(case["zone"]), case["from"], case["until"])
            except (KeyError, OSError, ValueError):
                cache[key] = None
        if cache[key] is None:
            answers.append(None)
            continue
        by_minute, changes = cache[key]
        times = occurrences(Pattern(case["pattern"]), by_minute, case["from"], case["n"])
        answers.append({"times": times, "offsets": changes})
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()

// The runs and planned occurrences that the timeline draws: asked for by row and span, kept, and renewed by events.
import { ask, known, now } from './store.js';
import { M, ms } from './format.js';

/** Jobs in one request: of each some 200 runs are kept, and an answer has 5,000 runs, or 10,000 planned occurrences. */
const ROWS = 24;
const LIMIT = 5000;
/** A job with more planned occurrences than this in a span is drawn as a dotted line. */
const PLAN_MOST = 400;
/** Runs are asked for anew after this time: events may be lost. */
const FRESH = M;
/** A row with more records lets those go that lie far from the window. */
const MANY = 400;

const iso = (t) => new Date(t).toISOString();
const keyOf = (r) => `${r.occurrence}/${r.attempt}`;

/** Times as numbers, once, because each frame compares them. */
function record(r) {
  const o = ms(r.occurrence);
  const s = ms(r.started_at) ?? o;
  return { ...r, o, s, e: r.outcome === 'running' ? null : s + (r.started_at ? r.duration_ms ?? 0 : 0) };
}

/**
 * Of which span the runs are known. `cut`: the last question whose answer had no room for the oldest; then those that
 * were planned before `from` are lacking, also where they last longer.
 */
const nothing = { from: Infinity, to: -Infinity, cut: null };

/**
 * What is known after `asked` was asked for. Of two spans that do not touch, the newer one. `oldest`: the answer was
 * cut, and this is the first instant that it has.
 */
export function covered(was, asked, oldest) {
  const span = { from: Math.max(asked.from, oldest ?? asked.from), to: asked.to };
  const touch = span.from <= was.to && span.to >= was.from;
  // A whole answer is better than a cut one around it.
  if (!touch || (was.cut && !asked.on && oldest == null)) return { ...span, cut: oldest == null ? null : asked };
  return { from: Math.min(was.from, span.from), to: Math.max(was.to, span.to), cut: oldest == null ? was.cut : asked };
}

/** About the same was asked for, and there was no room. What came later has all that lasted until then. */
const inVain = ({ cut, from }, t0, end) => (t0 < from && end >= cut.to) || (end - t0 > 0.75 * (cut.to - cut.from)
  && end >= cut.to - 0.25 * (cut.to - from));

/**
 * What to ask for, so that `span` has the window: with margins, unless an answer was cut. `on`: only what came since.
 * Null: nothing.
 */
export function missing(span, t0, t1) {
  const n = now();
  if (t0 > n) return null;
  const end = Math.min(t1, n);
  const begins = span.cut ? inVain(span, t0, end) : span.from <= t0;
  if (begins && span.to >= Math.min(t1, n - FRESH)) return null;
  const beside = span.cut ? 0 : (t1 - t0) / 2;
  const on = begins && span.to >= t0;
  return { from: on ? span.to - FRESH : t0 - beside, to: Math.min(t1 + beside, n), on };
}

const oldestOf = (answer) => (answer.truncated ? Math.min(...answer.runs.map((r) => ms(r.occurrence))) : null);

export class Data {
  /** `changed`: something has come, or could not be had. */
  constructor(changed) {
    this.changed = changed;
    /** By job: its records, sorted by occurrence; what is known of them; its plan. */
    this.rows = new Map();
    /** What is known of the runs of all jobs together. */
    this.every = nothing;
    this.asked = new Set();
    this.errors = { r: null, p: null };
    this.stop = new AbortController();
  }

  get error() {
    return this.errors.r ?? this.errors.p;
  }

  row(name) {
    let row = this.rows.get(name);
    if (!row) this.rows.set(name, (row = { all: new Map(), sorted: [], room: MANY, of: null, span: nothing, cut: false,
      schedule: null, plan: [], planFrom: Infinity, planTo: 0, planSpan: 0, dense: false }));
    const job = known.jobs.get(name);
    // It is in no configuration any more. Only the instances tell how long its runs go on.
    if (!job && row.of) {
      const runs = (r) => known.instances?.instances.some((i) => i.instance === r.instance && i.running.some((x) => x.job
        === name && x.occurrence === r.occurrence));
      if (this.drop(row, (r) => r.e == null && !runs(r))) {
        row.span = this.every = nothing;
        this.sort(row);
      }
    }
    // An event replaced the job: its newest runs are in it.
    if (job && row.of !== job) {
      row.of = job;
      for (const r of [...job.recent || [], ...job.running]) this.keep(row, { ...r, job: name });
      const open = new Set(job.running.map(keyOf));
      // Too much happened meanwhile: how it ended must be asked for.
      if (this.drop(row, (r, k) => r.e == null && !open.has(k))) row.span = this.every = nothing;
      this.sort(row);
      const schedule = [...job.schedule, job.timezone, job.enabled, job.elsewhere].join('\n');
      if (row.schedule !== schedule) Object.assign(row, { schedule, plan: [], planFrom: Infinity, dense: false });
    }
    return row;
  }

  /** An answer may be older than an event: what has ended stays so. An event does not have all of a record. */
  keep(row, r) {
    const was = row.all.get(keyOf(r));
    const is = record(r);
    if (was && was.e != null && is.e == null) return;
    row.all.set(keyOf(r), was?.outcome === is.outcome ? { ...was, ...is } : is);
  }

  sort(row) {
    row.sorted = [...row.all.values()].sort((a, b) => a.o - b.o || a.attempt - b.attempt);
  }

  /** Lets go of what lies far from the window: a page may stay open for months. Who comes back to it asks again. */
  forget(t0, t1) {
    const [from, to] = [2 * t0 - t1, 2 * t1 - t0];
    const near = (span) => ({ ...span, from: Math.max(span.from, from), to: Math.min(span.to, to) });
    for (const row of this.rows.values()) {
      if (row.all.size <= row.room) continue;
      this.drop(row, (r) => r.e != null && (r.e < from || r.s > to));
      this.sort(row);
      row.room = Math.max(MANY, 2 * row.all.size);
      row.span = near(row.span);
      this.every = near(this.every);
    }
  }

  /** Lets go of these. Returns whether there were any. */
  drop(row, which) {
    const { size } = row.all;
    for (const [k, r] of row.all) if (which(r, k)) row.all.delete(k);
    return row.all.size < size;
  }

  /** Asks for what is missing of these jobs between `t0` and `t1`. */
  want(names, t0, t1) {
    const span = t1 - t0;
    this.forget(t0, t1);
    const past = [];
    for (const n of names) {
      const asked = missing(this.row(n).span, t0, t1);
      if (asked && !this.asked.has(`r${n}`)) past.push([n, asked]);
    }
    for (let i = 0; i < past.length; i += ROWS) {
      const some = past.slice(i, i + ROWS);
      this.runs(some.map(([n]) => n), { from: Math.min(...some.map(([, a]) => a.from)), to: some[0][1].to });
    }
    const from = Math.max(now(), t0 - span / 2);
    const to = t1 + span / 2;
    // What was too much for a longer span may be drawn in a shorter one.
    const unplanned = (row) => row.planTo < t1 || row.planFrom > Math.max(now(), t0) || (row.dense && to - from
      < row.planSpan / 2);
    const ahead = t1 > now() ? names.filter((n) => unplanned(this.row(n)) && !this.asked.has(`p${n}`)) : [];
    for (let i = 0; i < ahead.length; i += ROWS) this.plan(ahead.slice(i, i + ROWS), from, to);
    this.calm(!past.length, !ahead.length);
  }

  /** For the view by instance: the runs of all jobs. */
  all(t0, t1) {
    this.forget(t0, t1);
    const asked = missing(this.every, t0, t1);
    if (asked && !this.asked.has('r*')) {
      this.asking = asked;
      this.runs(null, asked);
    }
    this.calm(!asked, true);
  }

  /** What could not be had is not wanted any more. */
  calm(runs, plans) {
    const { r, p } = this.errors;
    this.errors = { r: runs && !this.waits('r') ? null : r, p: plans && !this.waits('p') ? null : p };
    if (this.errors.r !== r || this.errors.p !== p) this.changed();
  }

  waits(mark) {
    return [...this.asked].some((a) => a.startsWith(mark));
  }

  /** Whether the oldest runs after `t0` are left out, of these jobs, or of all. */
  lacks(names, t0) {
    if (names) return names.some((n) => this.rows.get(n)?.cut);
    return this.every.cut && this.every.cut.to > t0 && (!this.asked.has('r*') || this.asking.on);
  }

  /** Asks once for what `mark` says, of these: `f`. */
  async load(mark, names, f) {
    for (const n of names) this.asked.add(mark + n);
    try {
      await f();
      this.errors[mark] = null;
    } catch (error) {
      if (this.stop.signal.aborted) return;
      this.errors[mark] = error;
      this.changed();
      // Not asked again at once, or a failing server would be asked with each frame.
      await new Promise((r) => setTimeout(r, 3000));
    } finally {
      for (const n of names) this.asked.delete(mark + n);
      if (!this.stop.signal.aborted) this.changed();
    }
  }

  /** Of all jobs without `names`. */
  runs(names, asked) {
    return this.load('r', names ?? ['*'], async () => {
      const q = new URLSearchParams({ from: iso(asked.from), to: iso(asked.to), limit: String(LIMIT) });
      for (const n of names ?? []) q.append('job', n);
      const answer = await ask(`runs?${q}`, { signal: this.stop.signal });
      const touched = new Set();
      for (const r of answer.runs) {
        const row = this.row(r.job);
        this.keep(row, r);
        touched.add(row);
      }
      for (const row of touched) this.sort(row);
      if (!names) this.every = covered(this.every, asked, oldestOf(answer));
      for (const n of names ?? []) {
        const row = this.row(n);
        row.span = covered(row.span, asked, null);
        row.cut = answer.truncated;
      }
    });
  }

  plan(names, from, to) {
    return this.load('p', names, async () => {
      const q = new URLSearchParams({ from: iso(from), to: iso(to), limit: String(ROWS * PLAN_MOST),
        per_job: String(PLAN_MOST) });
      for (const n of names) q.append('job', n);
      const schedules = names.map((n) => this.row(n).schedule);
      const answer = await ask(`plan?${q}`, { signal: this.stop.signal });
      const plans = new Map(names.map((n) => [n, []]));
      for (const p of answer.planned) plans.get(p.job)?.push(ms(p.occurrence));
      const dense = new Set(answer.frequent.map((f) => f.job));
      names.forEach((n, i) => {
        const row = this.row(n);
        // It may have been changed meanwhile.
        if (row.schedule === schedules[i]) Object.assign(row, { plan: plans.get(n), dense: dense.has(n), planFrom: from,
          planTo: to, planSpan: to - from });
      });
    });
  }
}

/** The records that touch the span. */
export const within = (records, t0, t1) => records.filter((r) => r.s <= t1 && (r.e ?? Infinity) >= t0);

/** What happened to the fleet as a whole, from the events: marks, and spans in which something was out of reach. */
export function fleetMarks() {
  const marks = [];
  const bands = [];
  // By name; null is the store.
  const down = new Map();
  for (const e of [...known.feed].reverse()) {
    const at = ms(e.at);
    if (e.kind === 'store') {
      // Another reason is another event.
      if (!e.reachable && !down.has(null)) {
        down.set(null, { from: ms(e.since) ?? at });
        marks.push({ at: ms(e.since) ?? at, text: 'store lost', bad: true, detail: e.error || '' });
      } else if (e.reachable && down.has(null)) {
        bands.push({ from: down.get(null).from, to: at });
        down.delete(null);
      }
    } else if (e.kind === 'data_lost') {
      bands.push({ from: ms(e.since) ?? at, to: ms(e.until) ?? at });
      marks.push({ at: ms(e.since) ?? at, text: 'data lost', bad: true,
        detail: 'the store is new, was restarted or lost its data' });
    } else if (e.kind === 'instance_silent' || e.kind === 'instance_gone') {
      if (!down.has(e.instance)) down.set(e.instance, { from: ms(e.since) ?? at });
      if (e.kind === 'instance_gone') down.get(e.instance).gone ??= at;
      marks.push({ at, text: `${e.instance} ${e.kind === 'instance_gone' ? 'gone' : 'silent'}`, bad: true });
    } else if (e.kind === 'instance_up') {
      if (down.has(e.instance)) bands.push({ from: down.get(e.instance).from, to: at, instance: e.instance });
      down.delete(e.instance);
      marks.push({ at, text: `${e.instance} up` });
    } else if (e.kind === 'configuration') marks.push({ at, text: `reload ${e.instance}` });
    else if (e.kind === 'draining') marks.push({ at, text: `drain ${e.instance}` });
    else if (e.kind === 'undrained') marks.push({ at, text: `undrain ${e.instance}` });
  }
  // Who is gone for good is missed by nobody; and that it is over may have been told while the page heard nothing.
  const silent = new Set((known.instances?.instances ?? []).filter((i) => i.silent).map((i) => i.instance));
  for (const [who, { from, gone }] of down) {
    const to = (who === null ? !known.store.reachable : silent.has(who)) ? null : gone ?? from;
    if (to !== from) bands.push({ from, to, ...(who !== null && { instance: who }) });
  }
  // The loss of the store is noted later than it was.
  return { marks: marks.sort((a, b) => a.at - b.at), bands };
}

// What the page knows of the fleet, and how it learns it: first the lists, then the stream of events. Components ask
// to be drawn again by topic: `jobs`, `instances`, `feed`, `link`, `session`, and `tick` each second.
import { useLayoutEffect, useState } from './base.js';
import { S, instancesAre, midnight, ms } from './format.js';
import { judge } from './judge.js';

/** All that is known. Only this module writes to it. */
export const known = {
  session: null,
  /** Jobs by name; an event replaces the whole object, so a row compares identities. */
  jobs: new Map(),
  /** The judgement of each job: its state, and whether it needs attention. */
  states: new Map(),
  /** The fields of the answer about jobs that are not jobs. */
  fleet: null,
  instances: null,
  /** Feed items, newest first. */
  feed: [],
  /** The store as seen by the instance: `{ reachable, error, since }`. */
  store: { reachable: true },
  /** The connection to the instance: `up`, else since when and when the page asks again. */
  link: { up: false, first: true, since: null, retryAt: null, error: null, hint: null },
  /** When the data was fresh last, by the fleet's clock. */
  asOf: null,
  needsToken: false,
  /** The instance has another version than the one that gave this page. */
  otherVersion: false,
  /** Latency of the store and clock offsets since the page was opened, for small charts. */
  trail: { store: [], offsets: new Map() },
};

const FEED_KEPT = 2000;
/** So many of them may be older than what runs tell, which the history has, too. */
const RARE_KEPT = 300;
const OF_RUNS = ['granted', 'ended', 'missed', 'skipped', 'unknown', 'awaited'];
const TRAIL_KEPT = 360;
/** The server writes a comment each 10 s. What is silent for longer hangs, or is out of reach. */
const SILENT_MS = 15_000;
/** The server gives itself 30 s for an answer. */
const ANSWER_MS = 40_000;
/**
 * A page that is not seen for so long lets go of its stream, and then asks so often. It is short because many tabs may
 * be opened at once: the seventh waits until one lets go.
 */
const HIDDEN_MS = 5_000;
const POLL_MS = 10_000;
/** So soon the first rows are seen. */
const DRAWN_MS = 100;

let skew = 0;
/** The fleet's time, Unix ms: the time of the last answer, carried on by this host's clock. */
export const now = () => Date.now() + skew;
/** The time that counters show. All take it from the last second, so that no two of them differ. */
export let moment = now();
function clockIs(text) {
  const measured = ms(text) - Date.now();
  if (!Number.isNaN(measured) && Math.abs(measured - skew) > 250) {
    skew = measured;
    if (!known.fleet) moment = now();
  }
}

// ---- topics

const listeners = new Map();
const dirty = new Set();
let flushing = false;
let flushed = 0;

export function on(topic, f) {
  if (!listeners.has(topic)) listeners.set(topic, new Set());
  listeners.get(topic).add(f);
  return () => listeners.get(topic).delete(f);
}

/** Draws at most ten times a second, however many events come. */
export function changed(topic) {
  dirty.add(topic);
  if (flushing) return;
  flushing = true;
  const wait = flushed ? Math.max(0, 100 - (performance.now() - flushed)) : 0;
  setTimeout(() => {
    flushing = false;
    flushed = performance.now();
    const called = new Set();
    for (const t of dirty) for (const f of listeners.get(t) || []) called.add(f);
    dirty.clear();
    for (const f of called) f();
  }, wait);
}

/** Draws the component again whenever one of the topics changes. */
export function useTopics(...topics) {
  const [, again] = useState(0);
  // At once: what changes before the next frame would be missed.
  useLayoutEffect(() => {
    const f = () => again((n) => n + 1);
    const offs = topics.map((t) => on(t, f));
    return () => offs.forEach((off) => off());
  }, [topics.join()]);
}

let today = midnight(now());
setInterval(() => {
  moment = now();
  // What the page has not heard is no reason for a warning.
  if (known.link.up) rejudge();
  // "tomorrow" is "today" now, also where nothing else has changed.
  if (today !== midnight(moment)) {
    today = midnight(moment);
    for (const topic of listeners.keys()) if (topic !== 'tick') changed(topic);
  }
  for (const f of listeners.get('tick') || []) f();
}, 1000);

// ---- requests

const TOKEN = 'soloist-token';
export const token = () => sessionStorage.getItem(TOKEN);
export function useToken(text) {
  if (text) sessionStorage.setItem(TOKEN, text);
  else sessionStorage.removeItem(TOKEN);
}
const headers = (more) => (token() ? { Authorization: `Bearer ${token()}`, ...more } : { ...more });

/** An answer that is not 2xx, with the server's words. */
export class Refused extends Error {
  constructor(status, problem) {
    super(problem.detail || problem.title || `the answer was ${status}`);
    this.status = status;
    this.hint = problem.hint;
  }
}

/** Nothing came for as long as something should have. */
class Silent extends Error {}

export async function ask(path, { body, signal, within = ANSWER_MS } = {}) {
  const late = new AbortController();
  const init = { headers: headers({ Accept: 'application/json' }), cache: 'no-store',
    signal: signal ? AbortSignal.any([signal, late.signal]) : late.signal };
  if (body !== undefined) {
    init.method = 'POST';
    init.headers['Content-Type'] = 'application/json';
    init.body = JSON.stringify(body);
  }
  // Only until the answer begins: a long list may take its time on a slow way.
  const timer = setTimeout(() => late.abort(), within);
  let answer;
  try {
    answer = await fetch(`api/v1/${path}`, init);
  } catch (error) {
    if (late.signal.aborted) throw new Silent('the instance does not answer');
    throw error.name === 'AbortError' ? error : new Error('the instance cannot be reached');
  } finally {
    clearTimeout(timer);
  }
  const json = await answer.json().catch((error) => {
    // It broke off.
    if (answer.ok) throw error;
    return {};
  });
  if (answer.status === 401) lock();
  if (!answer.ok) throw new Refused(answer.status, json);
  return json;
}

/** Saves a file of the instance; a link alone could not send the token. */
export async function download(path, name) {
  const answer = await fetch(path, { headers: headers(), cache: 'no-store' });
  if (!answer.ok) throw new Refused(answer.status, await answer.json().catch(() => ({})));
  const a = Object.assign(document.createElement('a'), { href: URL.createObjectURL(await answer.blob()),
    download: name });
  a.click();
  setTimeout(() => URL.revokeObjectURL(a.href), 10_000);
}

function lock() {
  if (known.needsToken) return;
  known.needsToken = true;
  changed('session');
}

/** Server-sent events of `path`, read with fetch() because EventSource cannot send a token. */
export async function* events(path, { signal, last, heard = () => {} } = {}) {
  const more = { Accept: 'text/event-stream' };
  if (last) more['Last-Event-ID'] = last;
  const watch = new AbortController();
  const stop = () => watch.abort();
  signal?.addEventListener('abort', stop);
  let timer;
  let silent = false;
  const alive = () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      silent = true;
      stop();
    }, SILENT_MS);
  };
  try {
    alive();
    const answer = await fetch(`api/v1/${path}`, { headers: headers(more), cache: 'no-store', signal: watch.signal });
    if (answer.status === 401) lock();
    if (!answer.ok) throw new Refused(answer.status, await answer.json().catch(() => ({})));
    yield { event: 'open' };
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = '';
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      alive();
      heard();
      const frames = (rest + value).split('\n\n');
      rest = frames.pop();
      for (const frame of frames) {
        const event = parse(frame);
        if (event) yield event;
      }
    }
  } catch (error) {
    throw silent ? new Silent('the instance says nothing') : error;
  } finally {
    clearTimeout(timer);
    signal?.removeEventListener('abort', stop);
    stop();
  }
}

function parse(frame) {
  const event = { event: 'message', id: null };
  const data = [];
  for (const line of frame.split('\n')) {
    const at = line.indexOf(':');
    if (at === 0) continue;
    const field = at < 0 ? line : line.slice(0, at);
    const value = at < 0 ? '' : line.slice(at + 1).replace(/^ /, '');
    if (field === 'data') data.push(value);
    else if (field === 'event' || field === 'id') event[field] = value;
  }
  if (!data.length) return null;
  try {
    event.data = JSON.parse(data.join('\n'));
  } catch {
    return null;
  }
  return event;
}

// ---- jobs and instances

function setJob(job) {
  known.jobs.set(job.job, job);
  known.states.set(job.job, judge(job, now()));
}

/** A run becomes long by time alone. */
function rejudge() {
  let any = false;
  for (const [name, job] of known.jobs) {
    if (!job.running.length) continue;
    const state = judge(job, now());
    if (state.key !== known.states.get(name)?.key) {
      known.states.set(name, state);
      any = true;
    }
  }
  if (any) changed('jobs');
}

/** With the instant from which on jobs start. */
const opens = (epoch, at) => (epoch?.wait_ms == null ? epoch : { ...epoch, until: Math.ceil((ms(at) + epoch.wait_ms) / S)
  * S });

function setJobs(answer) {
  const { jobs, ...fleet } = answer;
  clockIs(answer.now);
  known.fleet = { ...fleet, epoch: opens(fleet.epoch, answer.now) };
  known.asOf = ms(answer.as_of);
  known.jobs = new Map();
  known.states = new Map();
  for (const job of jobs) setJob(job);
  changed('jobs');
}

function setInstances(answer) {
  clockIs(answer.now);
  known.instances = answer;
  // An instance of an older version tells them with all jobs alone.
  const { problems, clock_doubt_ms, nobody_believes } = { ...known.fleet, ...answer };
  const epoch = 'epoch' in answer ? opens(answer.epoch, answer.now) : known.fleet?.epoch;
  if (known.fleet) known.fleet = { ...known.fleet, epoch, problems, clock_doubt_ms, nobody_believes };
  instancesAre(answer.instances.map((i) => i.instance));
  const { trail } = known;
  const keep = (list, value) => {
    if (typeof value !== 'number') return;
    list.push(value);
    if (list.length > TRAIL_KEPT) list.shift();
  };
  keep(trail.store, answer.store?.latency_ms);
  const names = new Set(answer.instances.map((i) => i.instance));
  for (const name of trail.offsets.keys()) if (!names.has(name)) trail.offsets.delete(name);
  for (const i of answer.instances) {
    if (!trail.offsets.has(i.instance)) trail.offsets.set(i.instance, []);
    keep(trail.offsets.get(i.instance), i.clock_offset_ms);
  }
  if (answer.store) storeIs({ reachable: answer.store.reachable ?? !answer.store.error, error: answer.store.error,
    since: answer.store.since });
  changed('instances');
}

function storeIs({ reachable, error, since }) {
  const was = known.store;
  if (was.reachable === reachable && was.error === (error ?? null)) return;
  known.store = { reachable, error: error ?? null, since: ms(since) ?? (reachable ? null : (was.since ?? now())) };
  changed('link');
}

/** Less than that an event can come after one that happened later, ms. */
const BEHIND_MS = 2000;

/** Puts `event` into `list`, which has the newest first. */
export function place(list, event) {
  const after = (e) => ms(e.at) > ms(event.at) && ms(e.at) - ms(event.at) < BEHIND_MS;
  let i = 0;
  while (i < list.length && after(list[i])) i += 1;
  list.splice(i, 0, event);
}

/** What is kept of the feed: runs push no act out of it. */
const kept = (list) => (list.length <= FEED_KEPT ? list
  : list.filter((e, i) => i < FEED_KEPT - RARE_KEPT || !OF_RUNS.includes(e.kind)).slice(0, FEED_KEPT));

export function feed(event) {
  // The answer to `history` may have told it already.
  if (known.feed.some((e) => e.cursor === event.cursor)) return;
  place(known.feed, event);
  known.feed = kept(known.feed);
  changed('feed');
}

/** Not more often, although the instances may be told often. */
const ROLE_MS = 4500;
let asking = false;
let askedAt = -Infinity;
/**
 * Asks again what the token may do: its role may change while the stream goes on. Takes nothing else, because behind a
 * load balancer another instance may answer. A token that is gone ends the stream.
 */
async function allowed() {
  if (asking || document.hidden || performance.now() < askedAt + ROLE_MS) return;
  asking = true;
  askedAt = performance.now();
  const before = token();
  const { role } = await ask('session', { within: SILENT_MS }).catch(() => ({}));
  asking = false;
  if (role == null || role === known.session.role || token() !== before) return;
  known.session = { ...known.session, role };
  changed('session');
}

/** Writes that this page has asked for wait here for the event that shows them. */
const watchers = new Set();
export function onEvent(f) {
  watchers.add(f);
  return () => watchers.delete(f);
}

function take({ event, data }) {
  if (known.store.reachable) known.asOf = now();
  for (const f of watchers) f(event, data);
  if (event === 'job') {
    setJob(data.job?.job ? data.job : data);
    changed('jobs');
  } else if (event === 'job_removed') {
    known.jobs.delete(data.job);
    known.states.delete(data.job);
    feed({ kind: event, ...data });
    changed('jobs');
  } else if (event === 'instances') {
    setInstances(data);
    if (known.session?.tokens) allowed();
  } else {
    if (event === 'store') storeIs(data);
    feed({ kind: event, ...data });
  }
}

// ---- the connection

let cursor = null;
/** When the instance was heard last. */
let heardAt = null;
const heard = () => {
  heardAt = now();
};
const pause = (length) => new Promise((r) => setTimeout(r, length));

async function load() {
  // All at once, because each way there and back is seen; without a token only the first is answered.
  const soon = { within: SILENT_MS };
  // The first rows come sooner without what is most of the answer.
  const begins = !known.jobs.size;
  const lists = Promise.all([ask(begins ? 'jobs?recent=1' : 'jobs', soon), ask('instances', soon)]);
  lists.catch(() => {});
  const session = await ask('session', soon);
  // The page may not understand all that another version says.
  known.otherVersion ||= known.session != null && known.session.version !== session.version;
  known.session = session;
  if (session.role == null) {
    // Not if the instance cannot tell who may do what: then the page asks again, with the token that it has.
    await lists.catch((error) => {
      if (error.status !== 401) throw error;
    });
  }
  known.needsToken = session.role == null;
  changed('session');
  if (known.needsToken) return false;
  const [jobs, instances] = await lists;
  // Who waits for the first rows waits for nothing else.
  flushed = 0;
  setJobs(jobs);
  setInstances(instances);
  cursor = jobs.cursor ?? null;
  if (begins) {
    await pause(DRAWN_MS);
    const all = await ask('jobs', soon);
    setJobs(all);
    cursor = all.cursor ?? null;
  }
  history();
  return true;
}

/**
 * The feed with `told`, all that an instance keeps of it, oldest first, up to the cursor `last`. What another instance
 * told, or the same one before it was started anew, is kept from the time before that: in it the same has other cursors.
 */
export function joined(feed, { events: told, cursor: last }) {
  const part = (e) => e.cursor.split('.');
  const number = (e) => Number(part(e)[1]);
  // An instance that has just been started tells of messages that were given up long ago.
  const begins = Math.min(...told.filter((e) => e.kind !== 'undelivered').map((e) => ms(e.at)));
  const [boot] = last.split('.');
  const seen = new Set(told.map((e) => e.cursor));
  const had = new Map(feed.map((e) => [e.cursor, e]));
  const mine = feed.filter((e) => part(e)[0] === boot && !seen.has(e.cursor));
  const list = feed.filter((e) => part(e)[0] !== boot && ms(e.at) < begins);
  // Nobody has told what happened between them.
  if (list.length && !mine.some((e) => e.kind === 'unheard')) {
    mine.push({ kind: 'unheard', cursor: `${boot}.0`, at: new Date(Math.min(begins, now())).toISOString() });
  }
  const all = [...told.map((e) => had.get(e.cursor) ?? e), ...mine];
  for (const e of all.sort((a, b) => number(a) - number(b))) place(list, e);
  return kept(list);
}

let asked = null;
/** What happened before the page was opened, or while it heard nothing, for the list of events. */
async function history() {
  const mine = Symbol('question');
  asked = mine;
  try {
    const answer = await ask('events?feed=true');
    // A later question was asked of another instance, perhaps.
    if (asked !== mine) return;
    known.feed = joined(known.feed, answer);
    changed('feed');
  } catch {
    // The list then goes on with the next event.
  }
}

function linkIs(state) {
  known.link = { ...known.link, ...state };
  changed('link');
}

const shown = () => new Promise((r) => {
  const f = () => {
    if (document.hidden) return;
    document.removeEventListener('visibilitychange', f);
    r();
  };
  document.addEventListener('visibilitychange', f);
  f();
});

/** Ends a stream when nobody has looked at the page for a while. */
function unseen() {
  const stop = new AbortController();
  let timer;
  const f = () => {
    clearTimeout(timer);
    if (document.hidden) timer = setTimeout(() => stop.abort(), HIDDEN_MS);
  };
  document.addEventListener('visibilitychange', f);
  f();
  return { signal: stop.signal, end: () => { clearTimeout(timer); document.removeEventListener('visibilitychange', f);
    } };
}

/**
 * Events, as they come. A page that is not seen asks for them now and then instead: a browser keeps only six
 * connections to a host, for all its tabs.
 */
async function* source() {
  for (;;) {
    const quiet = unseen();
    try {
      for await (const event of events('events', { last: cursor, signal: quiet.signal, heard })) yield event;
      return;
    } catch (error) {
      if (!quiet.signal.aborted) throw error;
    } finally {
      quiet.end();
    }
    while (document.hidden) {
      await Promise.race([pause(POLL_MS), shown()]);
      const answer = await ask(cursor ? `events?since=${encodeURIComponent(cursor)}` : 'events', { within: SILENT_MS });
      heard();
      if (answer.reset) yield { event: 'reset' };
      for (const e of answer.events) yield { event: e.kind, id: e.cursor, data: e };
      cursor = answer.cursor;
    }
  }
}

/** Keeps the page live until it is closed. Each failure waits longer, up to ten seconds. */
export async function live() {
  let failures = 0;
  let fresh = false;
  for (;;) {
    try {
      if (!fresh) fresh = await load();
      if (!fresh) {
        await tokenGiven();
        continue;
      }
      for await (const event of source()) {
        failures = 0;
        if (event.event === 'open') {
          heard();
          linkIs({ up: true, first: false, since: null, retryAt: null, error: null, hint: null });
          continue;
        }
        if (event.id) cursor = event.id;
        if (event.event === 'reset') {
          // If the lists do not come, it is not enough to go on from here.
          fresh = false;
          fresh = await load();
        } else take(event);
      }
      throw new Error('the instance ended the stream');
    } catch (error) {
      if (known.needsToken) {
        fresh = false;
        continue;
      }
      if (error instanceof Refused) fresh = false;
      failures += 1;
      const wait = failures === 1 ? 500 : Math.min(10_000, 1000 * 2 ** (failures - 2));
      // One break that heals at once, as a restart behind a load balancer, is not worth an alert. A silence has lasted.
      if (failures > 1 || error instanceof Silent) {
        const since = known.link.since ?? heardAt ?? now();
        linkIs({ up: false, since, retryAt: now() + wait, error: String(error.message || error),
          hint: error.hint ?? null });
      }
      await pause(wait);
    }
  }
}

let given = () => {};
const tokenGiven = () => new Promise((r) => {
  given = r;
});
/** Tries a token. Says what is wrong with it, or nothing. */
export async function enter(text) {
  // Other characters cannot be sent. Kept, they would make each request fail, also after a reload.
  useToken(/^[!-~]+$/.test(text.trim()) && text.trim());
  const session = await ask('session');
  if (session.role == null) {
    // Says why, if that is not the token's fault; it is kept.
    await ask('instances').catch((error) => {
      if (error.status !== 401) throw error;
    });
    useToken(null);
    return 'This instance does not know that token. Its line may have been removed, or it was cut when copied.';
  }
  known.needsToken = false;
  changed('session');
  given();
  return null;
}

/** Why this caller may not act; null if it may. */
export function forbidden() {
  const s = known.session;
  if (!s || known.link.first) return 'The page does not know yet what it may do.';
  if (!known.link.up) return 'The page has lost its instance, so it cannot ask for anything.';
  if (s.read_only) return 'This instance only lets itself be read: its configuration says read_only = true.';
  if (s.role === 'operate') return null;
  if (s.tokens) return 'Your token has the role read. Acting needs a token with the role operate.';
  return 'Without tokens the page may only read. Set tokens_file in [http]; soloist http token NAME operate makes one.';
}

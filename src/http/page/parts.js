// Small pieces that several screens share.
import { html, Component, useEffect, useLayoutEffect, useRef, useState } from './base.js';
import { clean, lasting, left, ms, number, short, took, visible, when } from './format.js';
import { Icon } from './icons.js';
import { BAD, OUTCOMES, byOccurrence, halted, word } from './judge.js';
import { forbidden, known, moment, now, on, useTopics } from './store.js';
import { go, jobLink } from './router.js';

/** Foreign text: its direction does not reach what stands around it, and what is invisible is written out. */
export const Txt = ({ children, c }) => html`<bdi class=${c}>${clean(children)}</bdi>`;

/** Text that changes with the clock. Only its text node is touched, each second. */
export function Live({ f, c }) {
  const ref = useRef();
  const write = () => {
    const text = f(moment);
    if (ref.current && ref.current.textContent !== text) ref.current.textContent = text;
  };
  useLayoutEffect(write);
  const latest = useRef(write);
  latest.current = write;
  // At once: an effect comes after the next frame, and a second that passes before that would be missed.
  useLayoutEffect(() => on('tick', () => latest.current()), []);
  return html`<span ref=${ref} class=${c}></span>`;
}

export const In = ({ t, c }) => html`<${Live} c=${c} f=${(n) => left(t - n)} />`;
export const Since = ({ t, c }) => html`<${Live} c=${c} f=${(n) => lasting(n - t)} />`;

/** A button. If acting is forbidden it stays reachable and says why. */
export function Btn({ icon, label, tip, c = '', onClick, acts, children, ...rest }) {
  const why = acts ? forbidden() : null;
  const text = why || tip || label;
  return html`<button type="button" class=${`btn ${c} ${label ? 'i' : ''}`} aria-label=${label} data-tip=${text}
    aria-disabled=${why ? 'true' : null} onClick=${why ? undefined : onClick} ...${rest}>
    ${icon && html`<${Icon} k=${icon} />`}${children}
  </button>`;
}

export const Chip = ({ on: pressed, icon, n, children, onClick }) => html`<button type="button" class="chip"
  aria-pressed=${String(!!pressed)} onClick=${onClick}>
  ${icon && html`<${Icon} k=${icon} />`}${children}${n != null && html` <b>${number(n)}</b>`}
</button>`;

export const Seg = ({ label, list, value, onPick }) => html`<span class="seg" role="group" aria-label=${label}>
  ${list.map(([k, text]) => html`<button type="button" key=${k} aria-pressed=${String(value === k)}
    onClick=${() => onPick(k)}>${text}</button>`)}
</span>`;

/** Where an instance's name leads. */
export const On = ({ id }) => (id ? html`<span data-tip=${clean(id)}><${Txt}>${short(id)}<//></span>` : '–');

/** Marks the run of an instance that is not heard from: until it is settled, nobody knows how it is. */
export function Silent({ id }) {
  useTopics('instances', 'link');
  const silent = known.store.reachable && known.instances?.instances.some((i) => i.instance === id && i.silent);
  return silent ? html` <b class="x-lapsed">(its instance is silent)</b>` : null;
}

export const Copy = ({ text, children }) => {
  const [done, set] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      set(true);
      setTimeout(() => set(false), 2000);
    } catch {
      prompt('Copy this:', text);
    }
  };
  return html`<button type="button" class="btn q s" onClick=${copy}>${done ? 'Copied' : children}</button>`;
};

// ---- the strip of the last occurrences

const W = 5;
const GAP = 2;
const TALL = 16;
const N = 24;

/** The path of one bar, and of the sign below it. Height is duration, by square root; shape is the outcome. */
function bar(kind, x, share) {
  const high = Math.max(2, Math.round(share * TALL));
  const y = TALL - high;
  const box = (a, b, w, h) => `M${a} ${b}h${w}v${h}h${-w}z`;
  if (kind === 'missed') return box(x + 0.75, 0.75, W - 1.5, TALL - 1.5);
  if (kind === 'skipped') return box(x, TALL - 2, W, 2);
  if (kind === 'timed_out') return box(x, 0, W, TALL) + box(x - 1, 0, W + 2, 2);
  if (kind === 'cancelled' || kind === 'replaced') return box(x + 0.5, y + 0.5, W - 1, high - 0.5);
  if (kind === 'crashed' || kind === 'unknown') {
    const top = Math.min(y, TALL - 9);
    return `M${x} ${TALL}V${top}L${x + W} ${top + 4}V${TALL}z`;
  }
  if (kind === 'lease_lost') {
    const piece = Math.max(2, high * 0.4);
    return box(x, TALL - piece, W, piece) + box(x, Math.min(y, TALL - 2 * piece - 2), W, piece);
  }
  return box(x, y, W, high);
}
const HOLLOW = ['missed', 'cancelled', 'replaced'];

/** What the strip shows: the last occurrences, oldest first, and a running one. */
export function stripItems(job, n = N) {
  const list = byOccurrence(job.recent || []);
  for (const r of job.running) {
    const was = list.findIndex((x) => x.occurrence === r.occurrence);
    if (was >= 0) list.splice(was, 1);
    list.push({ ...r, outcome: 'running', duration_ms: Math.max(0, now() - ms(r.started_at)), attempts: r.attempt });
  }
  return list.slice(-n);
}

export function stripWords(items) {
  const counts = OUTCOMES.concat('running').map((k) => [items.filter((i) => i.outcome === k).length, k]);
  return `Last ${items.length}: ${counts.filter(([c]) => c).map(([c, k]) => `${c} ${word(k)}`).join(', ')
    || 'nothing ran yet'}`;
}

/** One path for each outcome, so that a thousand rows are light. */
export function Strip({ job, n = N, wide }) {
  const items = stripItems(job, n);
  const longest = Math.max(1, ...items.map((i) => i.duration_ms || 0), (job.typical_ms || 0) * 1.2);
  const paths = {};
  const marks = {};
  let again = '';
  items.forEach((item, i) => {
    const x = (n - items.length + i) * (W + GAP);
    const kind = item.outcome;
    const share = item.duration_ms ? Math.max(0.14, Math.sqrt(Math.min(1, item.duration_ms / longest))) : 0.14;
    paths[kind] = (paths[kind] || '') + bar(kind, x, share);
    const sign = `M${x + W / 2} ${TALL + 1.5}l${W / 2} 3.5h${-W}z`;
    if (BAD.includes(kind) || kind === 'missed') marks[kind] = (marks[kind] || '') + sign;
    else if (item.attempts > 1 && kind === 'succeeded') again += sign;
  });
  const full = n * (W + GAP);
  const at = (e) => {
    const box = e.currentTarget.getBoundingClientRect();
    return items[Math.floor(((e.clientX - box.left) / box.width) * n) - (n - items.length)];
  };
  const tell = (e) => {
    const item = at(e);
    e.currentTarget.setAttribute('data-tip', item ? runWords(job.job, item) : stripWords(items));
  };
  const open = (e) => {
    const item = at(e);
    if (item) go(jobLink(job.job, ms(item.occurrence)));
  };
  return html`<svg class="st" viewBox=${`0 0 ${full} ${TALL + 5}`} width=${wide ? '100%' : full} height=${wide ? 38
    : TALL + 5}
    preserveAspectRatio=${wide ? 'none' : null} role="img" aria-label=${stripWords(items)} onPointerMove=${tell}
      onClick=${open}>
    ${Object.entries(paths).map(([k, d]) => html`<path key=${k} class=${`s-${k} ${HOLLOW.includes(k) ? 'hollow' : ''}`}
      d=${d} />`)}
    ${Object.entries(marks).map(([k, d]) => html`<path key=${`m${k}`} class=${`s-${k}`} d=${d} />`)}
    ${again && html`<path class="s-succeeded hollow" d=${again} />`}
  </svg>`;
}

/** One record in words, for tips and labels. */
export function runWords(job, r) {
  const lines = [`${job} · ${when(ms(r.occurrence), now())}`, word(r.outcome)];
  if (r.instance) lines[1] += ` on ${short(r.instance)}`;
  if (r.duration_ms != null && r.outcome !== 'running') lines[1] += `, took ${took(r.duration_ms)}`;
  if (r.lateness_ms != null) lines[1] += `, ${took(r.lateness_ms)} late`;
  if (r.attempts > 1) lines.push(`${r.attempts} attempts`);
  if (r.error) lines.push(clean(r.error));
  if (r.count > 1) lines.push(`stands for ${number(r.count)} occurrences`);
  return lines.join('\n');
}

// ---- windows: only rows that are seen are drawn

/** So far beyond the window rows are drawn, too, px. */
const BEYOND = 300;

/** Rows are drawn by so many: a scrolled line alone draws nothing. */
const STEP = 8;

/**
 * Which rows of a list are drawn as the window scrolls: `from` to `to`. `tops` has the offsets of the rows, one more than
 * there are; it is another array only if they are others, or each frame draws the list anew. Of another list so many rows more are drawn with each frame, so that none takes long; the rows from `ready`
 * on may show until then what they showed.
 */
export function useSeen(tops, ref) {
  const [, again] = useState(0);
  const seen = useRef({ tops: null, from: 0, to: 0, ready: Infinity, frame: 0 }).current;
  const range = (beyond) => {
    const top = ref.current ? -ref.current.getBoundingClientRect().top : 0;
    const find = (y) => {
      let [a, b] = [0, tops.length - 1];
      while (a < b) {
        const m = (a + b) >> 1;
        if (tops[m + 1] <= y) a = m + 1;
        else b = m;
      }
      return a;
    };
    return [Math.max(0, Math.floor(find(top - beyond) / STEP) * STEP),
      Math.min(tops.length - 1, Math.ceil((find(top + innerHeight + beyond) + 1) / STEP) * STEP)];
  };
  const show = (from, to) => {
    if (seen.from === from && seen.to === to && seen.ready === Infinity) return;
    Object.assign(seen, { from, to, ready: Infinity });
    again((n) => n + 1);
  };
  const latest = useRef();
  latest.current = () => show(...range(BEYOND));
  if (!seen.tops) {
    // At first, what is in the window.
    const [from, to] = range(0);
    Object.assign(seen, { tops, from, to });
  } else if (seen.tops !== tops) {
    const [from, most] = range(BEYOND);
    const to = Math.min(most, from + Math.max(STEP, seen.to - seen.from));
    // A list that changes with each frame comes to its end, too.
    const ready = seen.ready === Infinity ? 0 : seen.ready;
    Object.assign(seen, { tops, from, to, ready: Math.max(from + STEP, ready) });
  }
  const more = useRef();
  more.current = () => {
    seen.frame = 0;
    // It was scrolled.
    if (seen.ready === Infinity) return;
    seen.ready += STEP;
    if (seen.ready >= range(BEYOND)[1]) {
      latest.current();
      return;
    }
    seen.to = Math.max(seen.to, seen.ready);
    again((n) => n + 1);
    seen.frame = requestAnimationFrame(() => more.current());
  };
  useLayoutEffect(() => {
    if (seen.ready === Infinity) {
      const timer = setTimeout(() => latest.current(), 50);
      return () => clearTimeout(timer);
    }
    // Not in the frame that is drawn next: it has the first rows.
    seen.frame ||= requestAnimationFrame(() => {
      seen.frame = requestAnimationFrame(() => more.current());
    });
    return undefined;
  }, [tops]);
  useEffect(() => {
    const f = () => latest.current();
    const all = () => show(0, Infinity);
    addEventListener('scroll', f, { passive: true });
    addEventListener('resize', f);
    addEventListener('beforeprint', all);
    addEventListener('afterprint', f);
    return () => {
      cancelAnimationFrame(seen.frame);
      removeEventListener('beforeprint', all);
      removeEventListener('afterprint', f);
      removeEventListener('scroll', f);
      removeEventListener('resize', f);
    };
  }, []);
  return [Math.min(seen.from, tops.length - 1), Math.min(seen.to, tops.length - 1), seen.ready];
}

/** Whether the window is as narrow as a phone. */
const narrow = matchMedia('(max-width:700px)');
export function usePhone() {
  const [is, set] = useState(narrow.matches);
  useEffect(() => {
    const f = () => set(narrow.matches);
    narrow.addEventListener('change', f);
    return () => narrow.removeEventListener('change', f);
  }, []);
  return is;
}

/** Draws only when one of `same` has changed since it was drawn, and not while it `waits`. */
export class Memo extends Component {
  shouldComponentUpdate(next) {
    return !next.waits && next.same.some((v, i) => v !== this.drawn[i]);
  }

  render({ draw, same }) {
    this.drawn = same;
    return draw();
  }
}

/** So long it waits to ask again after the first failure, twice as long after the next one, and so on; ms. */
const AGAIN_MS = 1000;
const AGAIN_MOST_MS = 30_000;

/**
 * Calls `load` again when `of` or `moment` change. Gives `{ data, error, again }`; old data stay until the new are here,
 * and if these cannot be had, as long as they are of the same `of`. What the instance or the store did not answer is
 * asked for again by itself, once both are there.
 */
export function useLoaded(load, of, moment = []) {
  useTopics('link');
  const [state, set] = useState({ data: null, error: null, of: null, failures: 0 });
  const [round, again] = useState(0);
  const key = of.join('\u0000');
  useEffect(() => {
    const stop = new AbortController();
    load(stop.signal).then(
      (data) => !stop.signal.aborted && set({ data, error: null, of: key, failures: 0 }),
      (error) => !stop.signal.aborted && set((was) => ({ data: was.of === key ? was.data : null, error, of: key,
        failures: was.failures + 1 })),
    );
    return () => stop.abort();
  }, [key, moment.join('\u0000'), round]);
  const waits = live() && state.error && !(state.error.status < 500);
  useEffect(() => {
    if (!waits) return undefined;
    const timer = setTimeout(() => again((n) => n + 1), Math.min(AGAIN_MOST_MS, AGAIN_MS * 2 ** (state.failures - 1)));
    return () => clearTimeout(timer);
  }, [waits, state.failures]);
  return { ...state, again: () => again((n) => n + 1) };
}

export const Failed = ({ error, again }) => html`<p class="note" role="alert"><${Icon} k="failed" />
  <span>${error.message}${error.hint && html`<span class="t2">; ${error.hint}</span>`}</span>
  ${again && html` <button type="button" class="btn s" onClick=${again}>Ask again</button>`}</p>`;

/** On screens that show what is planned: why it does not start. That the store is away, the banner says. */
export function Held() {
  useTopics('jobs', 'instances', 'link');
  const why = known.store.reachable && halted(known);
  return why && html`<p class="note" role="status"><${Icon} k="slow" />${why}</p>`;
}

/** A browser takes the longer for each character, the longer its line is. */
const LINE = /[^\n]{4000}(?=[^\n])/gu;
/** Foreign output as it is shown: what is invisible is written as escapes. */
export const written = (text) => visible(text).replace(LINE, '$&\n');

// They stand around what came from stderr, also while it is searched and cut. No output brings them along.
const [ERR, OUT] = ['\ue000', '\ue001'];
const MARKS = /[\ue000\ue001]/g;
export const unmarked = (text) => text.replace(MARKS, '');
/** A piece of an output as text, with these marks. */
export function marked({ data, stderr = [] }) {
  const plain = (from, to) => data.slice(from, to).replace(MARKS, '\ufffd');
  const at = (i) => stderr[i]?.[1] ?? 0;
  return stderr.map(([from, to], i) => `${plain(at(i - 1), from)}${ERR}${plain(from, to)}${OUT}`).join('')
    + plain(at(stderr.length - 1));
}

/** Text that `written` gave: what came from stderr is told apart, and there are marks where `find` stands. */
export function Output({ text, find }) {
  const parts = text.split(OUT);
  const last = parts.pop();
  // What begins after its mark was cut before it.
  return [...parts.map((part) => [found(part.slice(0, Math.max(0, part.indexOf(ERR))), find), html`<i class="err"
    data-tip="stderr">${found(part.slice(part.indexOf(ERR) + 1), find)}</i>`]), found(last, find)];
}

function found(shown, find) {
  if (!find) return shown;
  const low = shown.toLowerCase();
  const parts = [];
  let at = 0;
  for (let i = low.indexOf(find); i >= 0 && parts.length < 2000; i = low.indexOf(find, at)) {
    parts.push(shown.slice(at, i), html`<mark>${shown.slice(i, i + find.length)}</mark>`);
    at = i + find.length;
  }
  return [...parts, shown.slice(at)];
}

// ---- a whole row leads where its first link does

document.addEventListener('click', (e) => {
  const row = !e.target.closest('a, button, .st') && e.target.closest('.rows:not(.inst) tbody tr');
  if (row && !String(getSelection())) row.querySelector('a')?.click();
});

// ---- one tip for all

const tip = document.createElement('div');
tip.className = 'tip';
tip.setAttribute('role', 'tooltip');
tip.hidden = true;
document.body.append(tip);

export function tipAt(text, x, y, h = 0) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  // A dialog lies over all else; the tip must be in it to be seen.
  (document.querySelector('dialog[open]') || document.body).append(tip);
  tip.style.left = `${Math.max(6, Math.min(innerWidth - tip.offsetWidth - 6, x - tip.offsetWidth / 2))}px`;
  const above = y - tip.offsetHeight - 6;
  tip.style.top = `${above < 4 ? y + h + 6 : above}px`;
}
function tipOf(e) {
  const of = e.target.closest?.('[data-tip]');
  if (!of || !of.dataset.tip) return tipAt('');
  const box = of.getBoundingClientRect();
  const x = e.clientX != null && box.width > 300 ? e.clientX : box.left + box.width / 2;
  tipAt(of.dataset.tip, of.matches('.st') ? e.clientX : x, box.top, box.height);
}
document.addEventListener('pointerover', tipOf);
document.addEventListener('pointermove', (e) => e.target.closest?.('.st') && tipOf(e));
document.addEventListener('focusin', (e) => e.target.matches?.(':focus-visible') && tipOf(e));
document.addEventListener('focusout', () => tipAt(''));
document.addEventListener('scroll', () => tipAt(''), { passive: true, capture: true });
addEventListener('hashchange', () => tipAt(''));

/** Says it to a screen reader, once. */
const said = document.createElement('div');
said.className = 'sr';
said.setAttribute('aria-live', 'polite');
document.body.append(said);
export const say = (text) => {
  said.textContent = text;
};

export const live = () => known.store.reachable && known.link.up;

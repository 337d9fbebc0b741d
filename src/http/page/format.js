// Times, durations and foreign text, as the page writes them. Nothing here touches the document.

export const S = 1000;
export const M = 60 * S;
export const H = 60 * M;
export const D = 24 * H;

const NB = '\u00a0';
const DAYS = ['Sun', 'Mon', 'Tue', 'Wed', 'Thu', 'Fri', 'Sat'];
const MONTHS = ['Jan', 'Feb', 'Mar', 'Apr', 'May', 'Jun', 'Jul', 'Aug', 'Sep', 'Oct', 'Nov', 'Dec'];
const two = (n) => String(n).padStart(2, '0');

/** RFC 3339 to Unix milliseconds; null stays null. */
export const ms = (text) => (text == null ? null : Date.parse(text));

/** The zone that the page writes times in, without its continent. */
export const zone = Intl.DateTimeFormat().resolvedOptions().timeZone || 'UTC';
export const zoneName = zone.split('/').pop().replace(/_/g, ' ');

export const hm = (t) => {
  const d = new Date(t);
  return `${two(d.getHours())}:${two(d.getMinutes())}`;
};
export const hms = (t) => `${hm(t)}:${two(new Date(t).getSeconds())}`;
export const hmsm = (t) => `${hms(t)}.${String(new Date(t).getMilliseconds()).padStart(3, '0')}`;

/** Midnight at the start of the day of `t`, `days` later. Days are not all 24 hours long. */
export function midnight(t, days = 0) {
  const d = new Date(t);
  return new Date(d.getFullYear(), d.getMonth(), d.getDate() + days).getTime();
}

export function day(t, now) {
  const d = new Date(t);
  const year = d.getFullYear() === new Date(now).getFullYear() ? '' : ` ${d.getFullYear()}`;
  return `${DAYS[d.getDay()]} ${d.getDate()} ${MONTHS[d.getMonth()]}${year}`;
}
export const weekday = (t) => DAYS[new Date(t).getDay()];
export const month = (t) => MONTHS[new Date(t).getMonth()];
export const date = (t) => {
  const d = new Date(t);
  return `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())}`;
};

/** "23:20", "tomorrow 02:30", "Sun 1 Nov 04:00"; with seconds if there are some, or, as in a column, always. */
export function when(t, now, always) {
  if (t == null) return '–';
  const time = always || t % M ? hms(t) : hm(t);
  const today = midnight(now);
  if (t >= today && t < midnight(now, 1)) return time;
  if (t >= midnight(now, 1) && t < midnight(now, 2)) return `tomorrow ${time}`;
  if (t >= midnight(now, -1) && t < today) return `yesterday ${time}`;
  return `${day(t, now)} ${time}`;
}

/** "2 min 15 s", in whole seconds, with spaces that do not break. At most two units. */
export function span(length) {
  const n = Math.max(0, length);
  const pair = (a, b, size) => {
    const rest = Math.floor((n % a[1]) / size);
    return `${Math.floor(n / a[1])}${NB}${a[0]}${rest ? `${NB}${rest}${NB}${b}` : ''}`;
  };
  if (n < M) return `${Math.floor(n / S)}${NB}s`;
  if (n < H) return pair(['min', M], 's', S);
  return n < D ? pair(['h', H], 'min', M) : pair(['d', D], 'h', H);
}

/** How long something took. As the commands and the words of the instance have it: what is less than a unit is cut. */
export function took(length) {
  if (length == null || Number.isNaN(length)) return '–';
  const n = Math.max(0, length);
  if (n < S) return `${Math.floor(n)}${NB}ms`;
  if (n < 10 * S) return `${(Math.floor(n / 10) / 100).toFixed(2)}${NB}s`;
  return n < M ? `${(Math.floor(n / 100) / 10).toFixed(1)}${NB}s` : span(n);
}

/** A length that was chosen, not measured: whole seconds are written so. */
export const chosen = (n) => (n < S || n % S ? took(n) : span(n));

/** How long something lasts already, in whole seconds. */
export const lasting = (length) => (length < S ? `less than 1${NB}s` : span(length));

/** A countdown: whole seconds, so that its width does not jump. */
export const left = (length) => span(Math.ceil(Math.max(0, length) / S) * S);

export const upper = (text) => text.replace(/^./, (c) => c.toUpperCase());
export const signed = (n) => (n > 0 ? '+' : n < 0 ? '−' : '') + Math.abs(n);
const grouped = new Intl.NumberFormat('en');
export const number = (n) => grouped.format(n);
export const many = (n, one, more = `${one}s`) => `${number(n)}${NB}${n === 1 ? one : more}`;

export function bytes(n) {
  if (n == null) return '–';
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let k = 0;
  while (n >= 1000 && k < units.length - 1) [n, k] = [n / 1024, k + 1];
  return `${n < 10 && k ? n.toFixed(1) : Math.round(n)}${NB}${units[k]}`;
}

// Characters that draw nothing, move the cursor, or turn the direction of what follows. Tab and line feed stay.
const HIDDEN = new RegExp('[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u200b-\\u200f\\u2028-\\u202e'
  + '\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb]|'
  + '[\\ud800-\\udbff](?![\\udc00-\\udfff])|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]', 'g');
const escape = (c) => {
  const code = c.charCodeAt(0);
  return code < 256 ? `\\x${code.toString(16).padStart(2, '0')}` : `\\u{${code.toString(16)}}`;
};

/** Foreign text of several lines, with what one cannot see written as escapes. */
export const visible = (text) => String(text ?? '').replace(/\r\n/g, '\n').replace(HIDDEN, escape);
/** The same on one line. */
export const clean = (text) => visible(text).replace(/[\n\t]/g, (c) => (c === '\n' ? '\\n' : '\\t'));

/** A word for a shell, quoted if it needs to be. */
const shell = (word) => (/^[\w@%+:,./-][\w@%+=:,./-]*$/.test(word) ? word
  : `'${String(word).replace(/'/g, "'\\''")}'`);
/** A command line of soloist, to be copied. Names and values may begin with `-`. */
export function commandLine(verb, names, options = {}) {
  const words = Object.entries(options).flatMap(([option, value]) => (value.startsWith('-') ? [`${option}=${value}`]
    : [option, value]));
  const all = names.some((name) => name.startsWith('-')) ? [...words, '--', ...names] : [...names, ...words];
  return ['soloist', verb, ...all].map(shell).join(' ');
}

let shared = new Set();
const host = (id) => clean(id).replace(/-[0-9a-f]{4}$/, '');
/** Tells `short` all instances. */
export function instancesAre(ids) {
  const names = ids.map(host);
  shared = new Set(names.filter((n, i) => names.indexOf(n) !== i));
}
/** The host's part of an instance's name: `web-1` of `web-1-5e6f`, if no other instance is on that host. */
export const short = (id) => (shared.has(host(id)) ? clean(id) : host(id));

const NAMED = new RegExp('^(today|tomorrow|yesterday|sun|mon|tue|wed|thu|fri|sat)?[a-z]*\\s*(?:at\\s*)?'
  + '(?:(\\d{1,2}):(\\d{2})(?::(\\d{2}))?)?$');

/**
 * What a person means by "2h", "tomorrow 06:00", "fri 18:00", "02:30" or an RFC 3339 text, in Unix milliseconds; null
 * if that is not clear. A time alone is the next one, or with `past` the last one.
 */
export function meant(text, now, past = false) {
  const t = text.trim().toLowerCase();
  if (!t) return null;
  const span = /^(?:in )?((?:\d+(?:\.\d+)?\s*(?:d|h|min|m|s)\s*)+)$/.exec(t);
  if (span) {
    const unit = { d: D, h: H, min: M, m: M, s: S };
    let sum = 0;
    for (const [, n, u] of span[1].matchAll(/(\d+(?:\.\d+)?)\s*(d|h|min|m|s)/g)) sum += n * unit[u];
    return past ? now - sum : now + sum;
  }
  const named = NAMED.exec(t);
  if (named && (named[1] || named[2])) {
    const [, word, h = 0, m = 0, s = 0] = named;
    const at = (days) => {
      const d = new Date(now);
      return new Date(d.getFullYear(), d.getMonth(), d.getDate() + days, +h, +m, +s).getTime();
    };
    if (h > 23 || m > 59 || s > 59) return null;
    if (word === 'today') return at(0);
    if (word === 'tomorrow') return at(1);
    if (word === 'yesterday') return at(-1);
    if (!word) return past ? (at(0) <= now ? at(0) : at(-1)) : at(0) > now ? at(0) : at(1);
    const far = (DAYS.findIndex((d) => d.toLowerCase() === word) - new Date(now).getDay() + 7) % 7;
    return past ? at(far - 7) : at(far || 7);
  }
  if (!/^\d{4}-\d\d-\d\d/.test(t)) return null;
  if (t.length === 10) return new Date(`${t}T00:00`).getTime() || null;
  const parsed = Date.parse(text.trim().replace(' ', 'T'));
  return Number.isNaN(parsed) ? null : parsed;
}

const SIGNALS = { 1: 'HUP', 2: 'INT', 3: 'QUIT', 4: 'ILL', 5: 'TRAP', 6: 'ABRT', 7: 'BUS', 8: 'FPE', 9: 'KILL',
  10: 'USR1', 11: 'SEGV', 12: 'USR2', 13: 'PIPE', 14: 'ALRM', 15: 'TERM', 24: 'XCPU', 25: 'XFSZ', 31: 'SYS' };
/** A signal by its name; one that is seldom seen by its number. */
export const signalName = (n) => (SIGNALS[n] ? `SIG${SIGNALS[n]}` : `signal ${n}`);

// Ctrl K: a job, an instance, a time or a command. And `?`: all keys that work here.
import { html, useEffect, useLayoutEffect, useRef, useState } from './base.js';
import { forbidden, known, now } from './store.js';
import { clean, meant, ms, when, zoneName } from './format.js';
import { Icon } from './icons.js';
import { word } from './judge.js';
import { go, here, jobLink, link } from './router.js';
import { keySets } from './keys.js';
import { act } from './actions.js';

let show = () => {};
export const openPalette = (text = '') => show(text);
let help = () => {};
export const openHelp = () => help();

const VERBS = [['trigger', 'play'], ['pause', 'pause'], ['resume', 'running'], ['skip', 'skipped'], ['cancel',
  'cancelled'],
  ['why', 'search'], ['output', 'logs']];
const PLACES = [['overview', 'Overview', 'g o'], ['timeline', 'Timeline', 'g t'], ['load', 'Load map', 'g l'],
  ['calendar', 'Calendar', 'g c'],
  ['instances', 'Instances', 'g i'], ['events', 'Events', 'g e'], ['wall', 'Wallboard', 'g w']];
const MOST = 8;
/** So much of a verb means it. */
const ENOUGH = 3;
const means = (typed, verb) => typed?.length >= ENOUGH && verb.startsWith(typed);
/** The jobs of which a verb changes something come first. */
const CHANGES = {
  pause: (job) => !job.paused,
  resume: (job) => job.paused != null,
  skip: (job) => job.schedule.length > 0,
  cancel: (job) => job.running.length + job.awaited.length > 0,
};

function matching(words, first = () => true) {
  const start = words[0] || '';
  const rank = (job) => 2 * first(job) + job.job.toLowerCase().startsWith(start);
  return [...known.jobs.values()].filter((job) => {
    const text = `${job.job} ${job.tags.join(' ')}`.toLowerCase();
    return words.every((w) => text.includes(w));
  }).sort((a, b) => rank(b) - rank(a)).slice(0, MOST);
}

/** The instances that are meant, and what may be done to each: never the opposite of what was typed. */
function fleet(words) {
  if (!words.length) return [];
  return (known.instances?.instances || []).map((i) => {
    const [what, opposite] = i.draining ? ['undrain', 'drain'] : ['drain', 'undrain'];
    const other = words.filter((w) => !i.instance.toLowerCase().includes(w));
    return { i, what, named: !other.length, contrary: words.some((w) => means(w, opposite)), meant: other.every((w) =>
      means(w, what) || means(w, opposite)) };
  }).filter((f) => f.meant).sort((a, b) => a.contrary - b.contrary).slice(0, MOST);
}

function run(verb, job) {
  const last = ms(job.running[0]?.occurrence ?? job.recent?.[0]?.occurrence);
  if (verb === 'why' || verb === 'output') go(jobLink(job.job, last));
  else act(verb, job.job);
}

/** What the text may mean: `[icon, text, note, what it does]`, and headings as text alone. */
function offers(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const list = [];
  const part = (title, items) => items.length && list.push(title, ...items);
  const [first, ...rest] = words;
  const [verb, icon] = VERBS.find(([v]) => means(first, v)) ?? [];
  const does = () => verb && part(`${verb} …`, matching(rest, CHANGES[verb]).map((j) => [icon, `${verb} ${j.job}`,
    word(known.states.get(j.job).key), () => run(verb, j)]));
  // A job may begin with the same letters.
  if (verb === first) does();
  const at = text.trim() && meant(text, now(), !/tomorrow|^in /.test(text));
  if (at) part('Time', [['clock', `Timeline at ${when(at, now())} ${zoneName}`, '', () => go(link('timeline', null, {
    at: new Date(at).toISOString() }))]]);
  part('Jobs', matching(words).map((j) => {
    const state = known.states.get(j.job);
    return [state.icon, j.job, word(state.key), () => go(jobLink(j.job))];
  }));
  if (verb !== first) does();
  const has = (name) => words.every((w) => name.toLowerCase().includes(w));
  part('Instances', fleet(words).flatMap(({ i, what, named, contrary }) => {
    const doing = ['drain', `${what} ${i.instance}`, '', () => act(what, i.instance)];
    const see = [i.silent ? 'lease_lost' : 'succeeded', i.instance, [i.silent && 'not heard from', i.draining && 'drains']
      .filter(Boolean).join(', '), () => go(link('instances'))];
    if (contrary) return [see];
    return named ? [see, doing] : [doing];
  }));
  const { screen, arg } = here();
  const job = screen === 'job' && known.jobs.get(arg);
  if (job) part('This job', VERBS.filter(([v]) => has(`${v} ${arg}`)).map(([v, sign]) => [sign, `${v} ${arg}`, '', () =>
    run(v, job)]));
  part('Screens', PLACES.filter(([, t]) => has(t)).map(([s, t, key]) => ['go', t, key, () => go(`#/${s}`)]));
  part('Commands', [
    ...(words.length ? [] : VERBS.slice(0, 5).map(([v, sign]) => [sign, `${v} a job …`, '', () =>
      openPalette(`${v} `)])),
    ...[['theme', 'Switch light and dark', 'g d', () =>
      document.querySelector('[aria-label="Light or dark"]')?.click()],
      ['planned', 'All keys', '?', openHelp]].filter(([, t]) => has(t)),
  ]);
  return list;
}

export function Palette() {
  const [text, set] = useState(null);
  const [at, setAt] = useState(0);
  const ref = useRef();
  show = (t) => {
    set(t);
    setAt(0);
  };
  // At once, not after the next frame: by then it may have been closed again, and would be opened anew. That it was
  // closed, the browser tells later: when it may be open again.
  useLayoutEffect(() => {
    if (text == null) return;
    if (!ref.current.open) {
      document.querySelector('dialog[open]')?.close();
      ref.current.showModal();
    }
    const input = ref.current.querySelector('input');
    input.focus();
  }, [text]);
  const close = () => ref.current?.close();
  const list = text == null ? [] : offers(text);
  const items = list.filter(Array.isArray);
  const sel = Math.min(at, items.length - 1);
  const pick = (item) => {
    close();
    set(null);
    setTimeout(item[3]);
  };
  const key = (e) => {
    if (e.key === 'ArrowDown') setAt((sel + 1) % items.length);
    else if (e.key === 'ArrowUp') setAt((sel + items.length - 1) % items.length);
    else if (e.key === 'Enter' && items[sel]) pick(items[sel]);
    else return;
    e.preventDefault();
  };
  useEffect(() => ref.current?.querySelector('[aria-selected=true]')?.scrollIntoView({ block: 'nearest' }), [sel]);
  return html`<dialog class="pal" ref=${ref} aria-label="Search or run" onClose=${() =>
    ref.current?.open || set(null)} onClick=${(e) =>
    e.target === ref.current && close()}>
    ${text != null && html`<input type="text" role="combobox" aria-label="A job, an instance, a time or a command"
      aria-expanded="true" aria-controls="offers"
      aria-activedescendant=${items.length ? `offer-${sel}` : null}
        placeholder="A job, an instance, a time like “yesterday 02:30”, or a command"
      value=${text} autocomplete="off" spellcheck="false" onInput=${(e) => show(e.target.value)} onKeyDown=${key} />
    <ul role="listbox" id="offers" aria-label="Offers" tabindex="-1">${list.map((o) => (Array.isArray(o)
    ? html`<li role="option" id=${`offer-${items.indexOf(o)}`} key=${o[1] + o[0]}
      aria-selected=${String(items.indexOf(o) === sel)} onClick=${() => pick(o)}>
        <${Icon} k=${o[0]} /><span><bdi>${clean(o[1])}</bdi></span><span class="sp"></span>
        ${/^(g .|\?)$/.test(o[2]) ? html`<kbd>${o[2]}</kbd>` : html`<span class="t3">${o[2]}</span>`}</li>`
    : html`<li class="g" role="presentation" key=${o}>${o}</li>`))}</ul>
    ${!items.length && html`<p class="none">Nothing is called so.</p>`}
    ${forbidden() && html`<p class="more">${forbidden()}</p>`}`}
  </dialog>`;
}

export function Help() {
  const [open, set] = useState(false);
  const ref = useRef();
  help = () => set(true);
  useLayoutEffect(() => {
    if (open && !ref.current.open) ref.current.showModal();
  }, [open]);
  const close = () => ref.current?.close();
  return html`<dialog class="help" ref=${ref} aria-labelledby="help" onClose=${() =>
    ref.current?.open || set(false)} onClick=${(e) =>
    e.target === ref.current && close()}>
    ${open && html`<div class="pad"><div class="hd"><h2 id="help">Keys</h2><span class="sp"></span>
      <button type="button" class="btn q i" aria-label="Close" onClick=${close}><${Icon} k="close" /></button></div>
      <div class="cols">${keySets().map((s) => html`<section key=${s.name}><h3>${s.name}</h3><dl>
        ${Object.entries(s.keys).map(([k, [text]]) =>
          html`<dt><kbd>${k}</kbd></dt><dd>${text}</dd>`)}</dl></section>`)}</div>
      <p class="t3">In a field, Esc leaves it. In a table, the arrow keys scroll; Tab goes through links and
        buttons.</p></div>`}
  </dialog>`;
}

// The frame of the page: navigation, banner, keys, theme, and the screen that the address names.
import { html, render, useEffect, useRef, useState } from './base.js';
import { enter, forbidden, known, live, now, useTopics } from './store.js';
import { clean, hms, lasting, left, when, zoneName } from './format.js';
import { Icon } from './icons.js';
import { Live, Txt } from './parts.js';
import { go, useRoute } from './router.js';
import { useKeys } from './keys.js';
import { Dialogs } from './actions.js';
import { Help, Palette, openHelp, openPalette } from './palette.js';
import { Overview, verdict } from './overview.js';

const later = (file, name) => {
  let loaded = null;
  const load = () => import(file).then((m) => m[name]);
  return () => (loaded ??= load().catch((error) => {
    loaded = null;
    throw error;
  }));
};
/** Key, address, label, and the module that draws it; those that are not seen at first are loaded when asked for. */
export const SCREENS = [
  ['o', 'overview', 'Overview', async () => Overview],
  ['t', 'timeline', 'Timeline', later('./timeline.js', 'Timeline')],
  ['l', 'load', 'Load', later('./load.js', 'Load')],
  ['c', 'calendar', 'Calendar', later('./calendar.js', 'Calendar')],
  ['i', 'instances', 'Instances', later('./instances.js', 'Instances')],
  ['e', 'events', 'Events', later('./events.js', 'Events')],
  ['w', 'wall', 'Wallboard', later('./wall.js', 'Wall')],
];
const JOB = later('./job.js', 'Job');

// ---- theme

const THEME = 'soloist-theme';
const kept = () => {
  try {
    return localStorage.getItem(THEME);
  } catch {
    return null;
  }
};
if (kept()) document.documentElement.dataset.theme = kept();
export function switchTheme() {
  const dark = matchMedia('(prefers-color-scheme:dark)').matches;
  const shown = document.documentElement.dataset.theme || (dark ? 'dark' : 'light');
  const theme = shown === 'dark' ? 'light' : 'dark';
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem(THEME, theme);
  } catch {
    // Without storage the choice lasts until the page is closed.
  }
  dispatchEvent(new Event('themechange'));
}

// ---- banner

/** Says on every screen that what is seen is old, and why. */
function Banner() {
  useTopics('link');
  const { link, store, asOf } = known;
  // Only an instance that answers says what to do.
  if (!link.up && link.hint) {
    return html`<div class="banner" role="alert"><${Icon} k="lease_lost" /><div><b>The instance answers, but does not
      tell this page what changes.</b> <${Txt}>${link.error}<//>: <${Txt}>${link.hint}<//>. Actions are
        off.</div><span class="sp"></span>
      <span class="t2">asking again in <${Live} f=${(n) => left(link.retryAt - n)} /></span></div>`;
  }
  if (!link.up && !link.first) {
    return html`<div class="banner" role="alert"><${Icon} k="lease_lost" /><div><b>This page has lost its instance
      ${' '}for <${Live} f=${(n) => lasting(n - link.since)} />.</b> The fleet goes on without
        the page.
      ${' '}What you see is from ${hms(asOf)}; actions are off.</div><span class="sp"></span>
      <span class="t2">asking again in <${Live} f=${(n) => left(link.retryAt - n)} /></span></div>`;
  }
  if (link.first && link.error) {
    return html`<div class="banner" role="alert"><${Icon} k="lease_lost" /><div><b>The instance does not answer.</b>
      ${' '}<${Txt}>${link.error}<//></div><span class="sp"></span>
      <span class="t2">asking again in <${Live} f=${(n) => left(link.retryAt - n)} /></span></div>`;
  }
  if (store.reachable) return null;
  return html`<div class="banner" role="alert"><${Icon} k="lease_lost" /><div><b>The store cannot be reached
    ${store.since != null && html` since ${when(Math.floor(store.since / 1000) * 1000, now())}`}.</b> Nothing starts;
      what runs keeps its lease while it
    lasts, then it is ended. ${store.error && html`<span class="t2"><${Txt}>${store.error}<//></span>`}</div><span
      class="sp"></span>
    <span class="t2">the instance asks again by itself</span></div>`;
}

// ---- token

function Enter() {
  const [text, set] = useState('');
  const [error, setError] = useState(null);
  const send = async (e) => {
    e.preventDefault();
    try {
      setError(await enter(text));
    } catch (err) {
      setError([err.message || err, err.hint].filter(Boolean).join(': '));
    }
  };
  return html`<main id="main"><form class="enter" onSubmit=${send}>
    <h1 class="verdict">This instance wants a token</h1>
    <p class="sub">It shows jobs and runs only to who has one. <code>soloist http token NAME read</code> makes one that
      may look,
    ${' '}with <code>operate</code> one that may act. The page keeps it until this tab is closed.</p>
    <input class="in" type="password" aria-label="Token" placeholder="Token" autocomplete="off" value=${text} autofocus
      onInput=${(e) => set(e.target.value)} />
    ${error && html`<p class="note x-failed" role="alert"><${Icon} k="failed" />${clean(error)}</p>`}
    <button type="submit" class="btn p">Enter</button>
  </form></main>`;
}

// ---- the frame

const Mark = () => html`<svg viewBox="0 0 18 18" aria-hidden="true"><circle cx="9" cy="9" r="7.6" fill="none"
  stroke="var(--tx3)"
  stroke-width="1.4" stroke-dasharray="1.2 3.57" /><circle cx="9" cy="1.9" r="1.9" fill="var(--ac)" />
  <circle cx="9" cy="9" r="3" fill="var(--ac)" /></svg>`;

function Top({ screen }) {
  useTopics('session', 'jobs');
  const why = known.session && known.link.up ? forbidden() : null;
  return html`<header class="top">
    <a class="skip-link" href="#main" onClick=${(e) => { e.preventDefault(); document.querySelector('#main').focus();
      }}>To the content</a>
    <a class="brand" href="#/overview"><${Mark} />soloist
      ${known.fleet && html`<small data-tip=${known.session
        && `by ${clean(known.session.instance)}, version ${clean(known.session.version)}`}>
      <${Txt}>${known.fleet.namespace}<//></small>`}</a>
    <nav aria-label="Main">${SCREENS.filter(([, s]) => s !== 'wall').map(([k, s, text]) => html`<a key=${s}
      href=${`#/${s}`} data-tip=${`g ${k}`}
      aria-current=${s === screen || (screen === 'job' && s === 'overview') ? 'page' : null}>${text}</a>`)}</nav>
    <span class="sp"></span>
    ${known.otherVersion && html`<button type="button" class="btn s"
      data-tip="The instance has another version than this page" onClick=${() => location.reload()}>Load the new
        page</button>`}
    ${why && html`<span class="tag" tabindex="0" data-tip=${why}><${Icon} k="key" /> read only</span>`}
    <button type="button" class="find" aria-keyshortcuts="Control+K" onClick=${() => openPalette()}><${Icon}
      k="search" />
      <span>Search or run</span><span class="sp"></span><kbd>Ctrl K</kbd></button>
    <span class="clock"><${Live} f=${hms} /> ${zoneName}</span>
    <button type="button" class="btn q i" aria-label="Light or dark" data-tip="Light or dark"
      onClick=${switchTheme}><${Icon} k="theme" /></button>
  </header>`;
}

const HINTS = {
  overview: [['j k', 'move'], ['Enter', 'open'], ['/', 'filter'], ['t', 'trigger'], ['p', 'pause']],
  job: [['j k', 'older, newer'], ['Enter', 'open'], ['Esc', 'close'], ['t', 'trigger'], ['p', 'pause']],
  timeline: [['n', 'now'], ['+ −', 'zoom'], ['← →', 'move'], ['Tab', 'into the chart'], ['/', 'filter']],
  instances: [['j k', 'move'], ['d', 'drain']],
  events: [['j k', 'move'], ['Enter', 'open'], ['/', 'filter']],
};
const Hints = ({ screen }) => html`<footer class="keys" aria-label="Keys">${(Object.hasOwn(HINTS, screen) ? HINTS[screen] : []).map(([k, text]) =>
  html`<span key=${k}>
  <kbd>${k}</kbd>${text}</span>`)}<span><kbd>Ctrl K</kbd>find</span><span><kbd>?</kbd>all keys</span></footer>`;

function titleOf(route) {
  if (route.screen === 'job') return `${clean(route.arg)} · soloist`;
  const label = SCREENS.find(([, s]) => s === route.screen)?.[2] ?? 'soloist';
  return route.screen === 'overview' || route.screen === 'wall' ? `${verdict()} · soloist` : `${label} · soloist`;
}

function Screen({ route }) {
  const wanted = route.screen === 'job' ? JOB : SCREENS.find(([, s]) => s === route.screen)?.[3];
  const [shown, set] = useState({ of: 'overview', draw: Overview });
  const [failed, setFailed] = useState(false);
  useEffect(() => {
    let here = true;
    setFailed(false);
    wanted?.().then((draw) => here && set({ of: route.screen, draw }), () => here && setFailed(true));
    return () => { here = false; };
  }, [route.screen]);
  if (!wanted) return html`<h1 class="verdict">There is no such screen</h1><p class="sub"><a class="b"
    href="#/overview">To the overview</a></p>`;
  if (failed) return html`<p class="note" role="alert">This screen could not be loaded. <button type="button"
    class="btn s" onClick=${() => location.reload()}>Load the page again</button></p>`;
  if (shown.of !== route.screen) return html`<h1 class="sr">${route.screen}</h1>`;
  const Draw = shown.draw;
  return html`<${Draw} key=${route.screen === 'job' ? route.arg : route.screen} arg=${route.arg} query=${route.query}
    />`;
}

function App() {
  const route = useRoute();
  useTopics('session');
  const first = useRef(true);
  useKeys('Everywhere', {
    'Ctrl K': ['search or run', () => openPalette()], '?': ['all keys', () => openHelp()],
    ...Object.fromEntries(SCREENS.map(([k, s, text]) => [`g ${k}`, [text.toLowerCase(), () => go(`#/${s}`)]])),
    'g d': ['light or dark', switchTheme],
  });
  useEffect(() => {
    const name = () => { document.title = titleOf(route); };
    name();
    const timer = setInterval(name, 2000);
    return () => clearInterval(timer);
  }, [route]);
  // A new screen begins at its top, and a screen reader hears its heading.
  useEffect(() => {
    if (!first.current) {
      scrollTo(0, 0);
      if (document.activeElement === document.body
        || !document.activeElement?.isConnected) document.querySelector('#main')?.focus({ preventScroll: true });
    }
    first.current = false;
  }, [route.screen, route.arg]);
  if (known.needsToken) return html`<${Enter} />`;
  const wall = route.screen === 'wall';
  return html`${!wall && html`<${Top} screen=${route.screen} />`}<${Banner} />
    <main id="main" tabindex="-1" class=${wall ? 'wall' : ''}><${Screen} route=${route} /></main>
    ${!wall && html`<${Hints} screen=${route.screen} />`}<${Dialogs} /><${Palette} /><${Help} />`;
}

render(html`<${App} />`, document.querySelector('#app'));
live();
// The other screens are fetched while nothing else is to do, so that they are here if the instance goes away.
setTimeout(() => [...SCREENS.map((s) => s[3]), JOB].forEach((f) => f().catch(() => {})), 1500);

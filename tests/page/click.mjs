// Clicks through the page, as a person does, and says what it saw. See README.md.
import { execSync } from 'node:child_process';
import { mkdirSync, readFileSync, renameSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import puppeteer from 'puppeteer-core';
import { stage } from './stage.mjs';

const GENEROUS = Number(process.env.PATIENCE_MS || 60_000);
const began = Date.now();
const { SOLOIST, SHOTS: shots } = process.env;
/** A fleet of its own, if no address is given. */
const pictures = process.argv[2] === 'pictures';
const NAMES = pictures ? ['web-1', 'web-2', 'worker-1'] : ['a', 'b', 'c'];
const own = process.argv[2] && !pictures ? null : await stage(SOLOIST, pictures ? 'pictures.toml' : 'jobs.toml', NAMES);
const url = (own?.url[NAMES[0]] ?? process.argv[2]).replace(/\/$/, '');
const token = own?.tokens.operate ?? process.env.SOLOIST_TOKEN;
const AXE = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');
if (shots) mkdirSync(shots, { recursive: true });

let page;
const troubles = [];
const saw = (text) => console.log(`${((Date.now() - began) / 1000).toFixed(1).padStart(5)} s: ${text}`);
const pause = (ms) => new Promise((r) => setTimeout(r, ms));

/** Waits until `f` of the document gives something, and gives it. */
async function until(what, f, ...args) {
  const end = Date.now() + GENEROUS;
  for (;;) {
    const got = await page.evaluate(f, ...args).catch(() => null);
    if (got) return got;
    if (Date.now() > end) {
      const text = await page.evaluate(() => (document.querySelector('dialog[open]')?.innerText ?? '')
        + document.body.innerText.slice(0, 1500));
      throw new Error(`waited in vain for ${what}; the page shows:\n${text}`);
    }
    await pause(50);
  }
}
const text = (selector) => page.evaluate((s) => document.querySelector(s)?.textContent ?? '', selector);
const go = async (hash) => {
  await page.evaluate((h) => { location.hash = h; }, hash);
  await pause(150);
};
/** Waits until what is shown stays the same for a moment, apart from what counts seconds. */
async function settled() {
  let [last, same] = ['', 0];
  for (const end = Date.now() + 10_000; same < 2 && Date.now() < end; await pause(60)) {
    const shown = await page.evaluate(() => document.body.innerText.replace(/\d+/g, '')
      + document.querySelectorAll('*').length);
    same = shown === last && !shown.includes('Asking …') ? same + 1 : 0;
    last = shown;
  }
}
/** Clicks the first button or link, of those that are seen, whose text or label begins with `label`. */
async function click(label, within = 'body') {
  const found = await until(`a button “${label}”`, (l, w) => {
    const all = [...document.querySelector(w).querySelectorAll('button,a,label')].filter((b) => b.offsetParent);
    const it = all.find((b) => (b.getAttribute('aria-label') || b.textContent).trim().startsWith(l)
      && b.getAttribute('aria-disabled') !== 'true');
    it?.setAttribute('data-clicked', '1');
    return !!it;
  }, label, within);
  if (found) {
    const el = await page.$('[data-clicked]');
    await el.evaluate((e) => e.removeAttribute('data-clicked'));
    await el.click();
  }
}
/** Waits for an element. A navigation that is not quite over may end the first wait. */
async function appears(selector) {
  const wait = () => page.waitForSelector(selector, { timeout: GENEROUS });
  await wait().catch((error) => (error.name === 'TimeoutError' ? Promise.reject(error) : wait()));
}
async function type(selector, value) {
  await appears(selector);
  await page.click(selector, { count: 3 });
  await page.keyboard.type(value);
}
const closed = () => until('the dialog to close', () => !document.querySelector('dialog[open]'));
const ctrlK = async () => {
  await page.keyboard.down('Control');
  await page.keyboard.press('KeyK');
  await page.keyboard.up('Control');
};
/** Asks the API from within the page, with its token. */
const api = (path) => page.evaluate(async (p) => {
  const t = sessionStorage.getItem('soloist-token');
  return (await fetch(`api/v1/${p}`, { headers: t ? { Authorization: `Bearer ${t}` } : {} })).json();
}, path);

/** Asks the API until `f` of the answer gives something, and gives it: it may be ahead of the page, or behind it. */
async function answered(what, path, f) {
  for (const end = Date.now() + GENEROUS; ; await pause(50)) {
    const got = f(await api(path));
    if (got) return got;
    if (Date.now() > end) throw new Error(`waited in vain for ${what}`);
  }
}

/** Requests that got no answer: what a page that was left asked for is among them. */
const lost = [];
function watch(origin = url) {
  page.on('pageerror', (e) => troubles.push(`an error on the page: ${e.message}`));
  page.on('requestfailed', (r) => lost.push(`${r.url()}: ${r.failure()?.errorText}`));
  page.on('request', (r) => {
    const to = new URL(r.url());
    if (to.protocol.startsWith('http')
      && to.origin !== new URL(origin).origin) troubles.push(`a request to another host: ${r.url()}`);
  });
  page.on('console', (m) => {
    if (/Content Security Policy|Refused to/.test(m.text())) troubles.push(`the policy was broken: ${m.text()}`);
  });
}

async function enter() {
  // So that there is something to see: a failure, output that is not to be trusted, a run that took too long.
  if (own && !pictures) for (const job of ['fails', 'hostile', 'hangs']) own.soloist('trigger', job);
  await page.goto(url, { waitUntil: 'domcontentloaded' });
  const first = await until('the first screen', () => document.querySelector('.enter .in, .board')?.className);
  if (first !== 'in') return saw('no token is needed');
  if (!token) throw new Error('this daemon wants a token: set SOLOIST_TOKEN');
  // The first has a character that no request can carry.
  for (const wrong of ['not-a-tok…n', 'not-a-token']) {
    await type('.enter input', wrong);
    await page.keyboard.press('Enter');
    const refusal = await until('a refusal', () => document.querySelector('.enter [role=alert]')?.textContent.trim());
    if (!refusal.startsWith('This instance does not know that token')) troubles.push(`the token ${wrong} is refused so: ${refusal}`);
    saw(`a wrong token: “${refusal}”`);
    await page.reload({ waitUntil: 'domcontentloaded' });
  }
  await type('.enter input', token);
  await page.keyboard.press('Enter');
  await until('the overview', () => document.querySelector('.board tbody tr.row'));
  return saw('the right token opens the page');
}

async function overview() {
  await until('rows', () => document.querySelectorAll('.board tbody tr.row').length > 2);
  saw(`the overview: “${await text('.verdict')}”, ${await page.evaluate(() =>
    document.querySelectorAll('.board tr.row').length)} rows`);
  if (await page.evaluate(() => window.pwned
    || document.querySelector('main img, main script'))) throw new Error('a description was run');
  const hostile = await page.evaluate(() => document.querySelector('tr[data-job=hostile] .d')?.textContent);
  if (hostile) saw(`a hostile description as text: ${JSON.stringify(hostile)}`);
}

async function trigger() {
  await ctrlK();
  await page.waitForSelector('dialog.pal input', { timeout: GENEROUS });
  await page.keyboard.type('trigger talks');
  await until('the offer', () =>
    /trigger talks/.test(document.querySelector('.pal li[aria-selected=true]')?.textContent));
  await page.keyboard.press('Enter');
  saw(`the dialog: “${await until('the dialog', () =>
    document.querySelector('dialog[open] h2')?.textContent)}”, ${await text('dialog[open] .cmd code')}`);
  // The page may not know yet what it may do.
  await until('a button that is on', () => document.querySelector('dialog[open] [type=submit]:not([aria-disabled=true])'));
  await page.keyboard.press('Enter');
  await until('its run, opened by itself', () => document.querySelector('h1')?.textContent === 'talks'
    && document.querySelector('.side .x-running'));
  saw('talks runs, and its run is opened');
  await closed();
}

async function output() {
  const lines = () => (document.querySelector('.outw pre')?.textContent.match(/line \d+/g) || []).length;
  const some = await until('output', lines);
  await until('more output', (n) => (document.querySelector('.outw pre')?.textContent.match(/line \d+/g)
    || []).length > n + 3, some);
  saw(`the output as it comes: ${some}, then ${await page.evaluate(lines)} lines`);
  saw(`why: ${(await until('a decision', () => document.querySelector('.why tr.won')?.textContent)).trim()}`);
}

/** Of a long output the end is shown, and no line is so long that the browser takes long for it. */
async function longOutput() {
  if (!own) return;
  own.soloist('trigger', 'wordy');
  const run = await answered('its run', 'jobs/wordy/runs?limit=1', ({ runs: [r] }) => (r?.outcome === 'succeeded' ? r : null));
  await go(`#/job/wordy?o=${Date.parse(run.occurrence)}`);
  await until('the last line', () => document.querySelector('.outw pre')?.textContent.endsWith('the last line\n'));
  if (!/only its end is shown/.test(await text('.side'))) troubles.push('the page does not say that it shows the end only');
  const longest = await page.$eval('.outw pre', (pre) => Math.max(...pre.textContent.split('\n').map((l) => l.length)));
  if (longest !== 4000) troubles.push(`the longest line of an output has ${longest} characters`);
  saw('the end of a long output');
}

async function cancel() {
  await click('Cancel', '.side');
  saw(`the dialog: “${await until('the dialog', () => document.querySelector('dialog[open] h2')?.textContent)}”`);
  await click('Cancel what runs', 'dialog[open]');
  await until('its end', () => document.querySelector('.side .hd .x-cancelled'));
  saw('the run ended as cancelled');
  await closed();
  await page.keyboard.press('Escape');
}

/** A job that needs attention and runs is among those that run; and what is said of its run goes with the time. */
async function runsAgain() {
  if (!own) return;
  await page.mouse.move(5, 300);
  const once = (j) => j.state === 'failed' && j.attention === 'failed';
  own.soloist('trigger', 'again');
  await answered('its failure', 'jobs/again', once);
  own.soloist('trigger', 'again');
  const second = (j) => once(j) && j.running.find((r) => r.attempt === 2);
  await answered('that it needs attention while it runs', 'jobs/again', second);
  await go('#/overview?f=running');
  await until('a job that needs attention among those that run', () => document.querySelector(
    'tr[data-job=again] .ic')?.getAttribute('aria-label') === 'failed');
  await until('why, and that it runs', () => [...document.querySelectorAll('.att li')].some((l) => /^again.*The run of.*failed/s.test(
    l.innerText) && /It runs on/.test(l.innerText)));
  const chip = () => [...document.querySelectorAll('.bar button')].find((b) => /Running\s*[1-9]/.test(
    b.textContent))?.textContent;
  saw(`a job that needs attention and runs: “${await until('its count', chip)}”`);
  await until('no lateness of an attempt that was planned anew', () => document.querySelector(
    'tr[data-job=again] .c-l')?.textContent === '–');
  const run = await answered('its second attempt', 'jobs/again', (j) => j.running.find((r) => r.attempt === 2));
  await go(`#/job/again?o=${Date.parse(run.occurrence)}`);
  await until('a decision', () => document.querySelector('.why tr.won'));
  const said = await until('what is said of it', () => /.*running.*/.exec(document.querySelector('.verd')?.textContent)?.[0]);
  const later = await until('what is said later', (was) => /.*running.*/.exec(document.querySelector(
    '.verd')?.textContent.replace(was, ''))?.[0], said);
  saw(`its verdict: “${said}”, then “${later}”`);
  own.soloist('cancel', 'again');
  await until('its end', () => document.querySelector('.side .hd .x-cancelled'));
}

/** The page of a job that went wrong begins with that. A click anywhere in a row opens it, and stderr is told apart. */
async function wentWrong() {
  if (!own) return;
  await answered('that it failed', 'jobs/fails', (j) => j.attention);
  await go('#/overview');
  await page.mouse.move(5, 5);
  await until('that it fails', () => document.querySelector('tr[data-job=fails] .c-s')?.textContent !== null
    && document.querySelector('tr[data-job=fails] .ic')?.getAttribute('aria-label') === 'failed');
  await page.click('tr[data-job=fails] .c-l');
  await until('the job, by a click beside its name', () => document.querySelector('h1')?.textContent === 'fails');
  saw(`what went wrong: “${await until('what went wrong, before the charts', () => {
    const wrong = document.querySelector('.wrong');
    const before = wrong?.compareDocumentPosition(document.querySelector('.plot') ?? wrong) === 4;
    return before && /exit 3.*no such ledger/s.test(wrong.innerText) && document.querySelector('.wrong p').textContent
      && wrong.innerText;
  })}”`);
  await page.click('.hist tbody tr .h-why');
  saw(`from stderr: ${await until('what came from stderr', () => document.querySelector('.side .outw .err')?.textContent)}`);
  // On nothing that has a tip.
  await page.mouse.move(5, 300);
}

/** Charts say what was measured, also if that is 0, and lengths of time are written as the commands write them. */
async function figures() {
  await page.evaluate(() => {
    const real = window.fetch;
    window.answers = () => { window.fetch = real; };
    const run = (day) => ({ job: 'nightly', run_id: `${day}`, occurrence: `2026-01-0${day}T01:30:00.000Z`, attempt: 1,
      trigger: 'schedule', instance: 'a', outcome: 'succeeded', lateness_ms: 0, duration_ms: 91_900 });
    window.fetch = (to, init) => (/nightly\/runs\?/.test(to) ? Promise.resolve(new Response(JSON.stringify({
      runs: [run(2), run(1)], next: null }))) : real(to, init));
  });
  await go('#/job/nightly');
  const charts = await until('its charts', () => document.querySelectorAll('.plot canvas').length === 2
    && [...document.querySelectorAll('.plot')].map((p) => p.getAttribute('aria-label')));
  await page.evaluate(() => window.answers());
  saw(`charts: ${JSON.stringify(charts)}`);
  for (const [i, words] of [/median 1\smin\s31\ss,/, /median 0\sms, 95 % under 0\sms, most 0\sms/].entries()) {
    if (!words.test(charts[i])) troubles.push(`a chart does not say ${words}: ${charts[i]}`);
  }
}

/** A record may stand for several occurrences, and one may succeed at its second attempt. */
async function counted() {
  await page.evaluate(() => {
    const real = window.fetch;
    window.answers = () => { window.fetch = real; };
    const run = (day, attempt, outcome, count) => ({ job: 'weekly', run_id: `${day}.${attempt}`, attempt, outcome, count,
      error: attempt ? null : 'no instance was up', occurrence: `2026-01-0${day}T04:30:00.000Z`, trigger: 'schedule', instance: 'a', duration_ms: 9 });
    window.fetch = (to, init) => (/weekly\/runs\?/.test(to) ? Promise.resolve(new Response(JSON.stringify({
      runs: [run(5, 0, 'missed', 1), run(3, 0, 'missed', 4), run(2, 2, 'succeeded'), run(2, 1, 'failed'), run(1, 1, 'succeeded')], next: null })))
      : real(to, init));
  });
  await go('#/job/weekly');
  await until('its history', () => document.querySelectorAll('.hist tbody tr').length === 3);
  const said = (await text('.job')).replace(/\s+/g, ' ');
  for (const words of ['7 occurrences', 'All 7', 'missed 5', 'missed × 5', 'no instance was up', 'succeeded 2',
    'more than one attempt 1']) {
    if (!said.includes(words)) troubles.push(`the page of a job does not say “${words}”: ${said.slice(0, 600)}`);
  }
  const planned = await page.$$eval('.hist tbody td:nth-child(2)', (all) => all.map((td) => td.textContent));
  if (!planned.every((at) => /\d\d:\d\d:\d\d$/.test(at)) || !/ to /.test(planned[0])) {
    troubles.push(`a column of times, and what is folded: ${planned}`);
  }
  await page.evaluate(() => window.answers());
  const [hint] = (await text('.keys')).split('Enter');
  if (!/older, newer/.test(hint)) troubles.push(`j goes to the older one, and the foot of the page says “${hint}”`);
  saw('occurrences are counted, not records or attempts');
}

/** A job that is removed while its page is open. */
async function gone() {
  await go('#/job/weekly');
  await until('the job', () => document.querySelector('h1')?.textContent === 'weekly');
  await until('its definition', () => /Digest/.test(document.querySelector('main').textContent));
  await page.evaluate(async () => {
    const { known, changed } = await import('./static/store.js');
    const real = window.fetch;
    window.fetch = (to, init) => (/jobs\/weekly/.test(to) ? Promise.resolve(new Response('{"detail": "no such job"}',
      { status: 404 })) : real(to, init));
    known.jobs.delete('weekly');
    known.states.delete('weekly');
    changed('jobs');
  });
  saw(`a job that is gone: “${await until('what became of it', () => /^No job/.test(document.querySelector(
    'h1').textContent) && document.querySelector('h1').textContent)}”`);
  // The first frame comes after a second: an address that changes before it counts all the same.
  const { identifier } = await page.evaluateOnNewDocument(() => {
    const [later, first] = [window.setTimeout, performance.now() + 1000];
    const wait = (length) => Math.max(length || 0, first - performance.now());
    window.setTimeout = (f, length, ...rest) => later(f, wait(length), ...rest);
    window.requestAnimationFrame = (f) => later(f, wait(16));
  });
  await page.reload({ waitUntil: 'domcontentloaded' });
  await page.removeScriptToEvaluateOnNewDocument(identifier);
  await go('#/overview');
  await until('rows', () => document.querySelector('.board tbody tr.row'));
}

/** The day changes under an open page: what was tomorrow is today. The zone of the page moves instead of the clock. */
async function anotherDay() {
  await go('#/overview');
  const dates = [];
  for (const there of ['Etc/GMT+12', 'Etc/GMT-14', undefined]) {
    await page.emulateTimezone(there);
    dates.push(await until(`the day of the next run, in ${there}`, async () => {
      const [{ when, ms }, { known, now }] = await Promise.all([import('./static/format.js'),
        import('./static/store.js')]);
      const shown = document.querySelector('tr[data-job=weekly] .c-at').textContent;
      return shown === when(ms(known.jobs.get('weekly').next), now(), true) && shown;
    }));
  }
  saw(`the next run, as the day changes: ${dates.join(', ')}`);
}

/** What has just been drawn counts at once, however long the next frame takes. */
async function countsAtOnce() {
  await go('#/instances');
  await until('the instances', () => document.querySelector('table.inst'));
  const wrong = await page.evaluate(async () => {
    const [{ left, ms }, store] = await Promise.all([import('./static/format.js'), import('./static/store.js')]);
    const [later, frame] = [window.setTimeout, window.requestAnimationFrame];
    window.setTimeout = (f, length, ...rest) => later(f, (length || 0) + 1500, ...rest);
    window.requestAnimationFrame = (f) => later(f, 1500);
    location.hash = '#/overview';
    // What changes meanwhile is drawn later.
    const plain = (job) => !job.paused && !job.awaited.length && !job.running.length && job.next;
    const same = new Map([...store.known.jobs].map(([name, job]) => [name, plain(job)]));
    const found = [];
    for (let i = 0; i < 50; i++) {
      await new Promise((r) => { later(r, 100); });
      for (const [name, next] of same) {
        if (!next || plain(store.known.jobs.get(name)) !== next || ms(next) <= store.moment) same.delete(name);
      }
      for (const row of document.querySelectorAll('.board tr.row')) {
        const next = same.get(row.dataset.job);
        const shown = next && row.querySelector('.c-x').textContent;
        if (next && shown !== left(ms(next) - store.moment)) found.push(`${row.dataset.job}: ${shown}`);
      }
    }
    [window.setTimeout, window.requestAnimationFrame] = [later, frame];
    return document.querySelector('.board tr.row') ? found : ['no rows'];
  });
  if (wrong.length) troubles.push(`before the next frame countdowns stand still: ${wrong.slice(0, 5)}`);
  saw('what has just been drawn counts at once');
}

/** Whatever is drawn in the middle of a second counts as the rest of the page does. */
async function countdowns() {
  await go('#/overview');
  await until('a line that counts', () => document.querySelector('.att .nx span'));
  const differ = await page.evaluate(async () => {
    const { changed } = await import('./static/store.js');
    const found = [];
    for (let i = 0; i < 25; i++) {
      changed('jobs');
      await new Promise((r) => { setTimeout(r, 110); });
      for (const line of document.querySelectorAll('.att li')) {
        const job = line.querySelector('.nm').textContent;
        const counter = (e) => /\d[\d\sa-z]*/.exec([...(e?.querySelectorAll('span') ?? [])].pop()?.textContent)?.[0];
        const above = counter(line.querySelector('.nx'));
        const below = counter(document.querySelector(`tr[data-job=${job}] .c-x`));
        if (above && below && above !== below) found.push(`${job}: ${above}, ${below}`);
      }
    }
    return found;
  });
  if (differ.length) troubles.push(`two countdowns to the same instant differ: ${differ}`);
  saw('all countdowns agree');
}

async function pauseIt() {
  await go('#/overview');
  await page.waitForSelector('tr[data-job=quick]', { timeout: GENEROUS });
  await page.focus('tr[data-job=quick] th a');
  await page.keyboard.press('Tab');
  await page.$eval('tr[data-job=quick] [aria-label^="Pause"]', (b) => b.click());
  await page.waitForSelector('dialog[open] input', { timeout: GENEROUS });
  await page.keyboard.type('clicking <b>through</b>');
  await page.keyboard.press('Tab');
  await page.keyboard.type('2h');
  saw(`until “2h”: ${await until('the meaning', () => /skipped/.test(document.querySelector('#h-until')?.textContent)
    && document.querySelector('#h-until').textContent)}`);
  saw(`the command: ${await text('dialog[open] .cmd code')}`);
  await click('Pause', 'dialog[open] .foot');
  await closed();
  await page.mouse.move(5, 300);
  saw(`paused: ${await until('the pause', () =>
    document.querySelector('.also')?.textContent.includes('clicking <b>through</b>')
      && document.querySelector('.also li').textContent)}`);
  await until('the row', () => document.querySelector('tr[data-job=quick] .x-paused'));
  await closed();
  // Three letters mean a command; and of what it changes something comes first.
  for (const [typed, offer] of [['resume', 'resume quick'], ['res', 'resume quick'], ['trig nigh', 'trigger nightly']]) {
    await ctrlK();
    await page.keyboard.type(typed);
    const offered = () => page.$eval('#offers [aria-selected=true] bdi', (o) => o.textContent);
    await until(`${offer} for ${typed}`, (t) => document.querySelector('.pal input')?.value === t, typed);
    await pause(100);
    if (await offered() !== offer) troubles.push(`who typed ${typed} is offered ${await offered()}`);
    await page.keyboard.press('Escape');
    await closed();
  }
  await go('#/job/quick');
  await until('the job', () => document.querySelector('h1')?.textContent === 'quick');
  await click('Skip', '.hd');
  await until('the dialog', () => document.querySelector('dialog[open]'));
  await page.evaluate(() => history.back());
  await closed();
  await page.evaluate(() => history.forward());
  await until('the job again', () => document.querySelector('h1')?.textContent === 'quick');
  // Keys work a moment after the screen is drawn.
  for (let i = 0; i < 50 && !await page.$('dialog[open]'); i += 1, await pause(100)) await page.keyboard.press('r');
  await click('Resume', 'dialog[open] .foot');
  await until('the pause to end', () => [...document.querySelectorAll('.hd .btn')].some((b) =>
    b.textContent.includes('Pause')));
  saw('resumed, by the key r');
}

async function skip() {
  await closed();
  await go('#/job/nightly');
  await until('the job', () => document.querySelector('h1')?.textContent === 'nightly');
  for (const [n, what] of [['2', 'will be skipped'], ['0', '']]) {
    await click('Skip', '.hd');
    await type('dialog[open] input', n);
    await click('Skip', 'dialog[open] .foot');
    await until('the skip', (w) => (document.querySelector('.notes')?.textContent ?? '').includes(w), what);
    if (!what) await until('no skip', () => !document.querySelector('.notes'));
    await closed();
    saw(what ? `the next ${n} ${what}` : 'none will be skipped');
    if (!what) continue;
    await go('#/overview');
    await until('the row', () => document.querySelector('tr[data-job=nightly]')?.textContent.includes(' after 2 skipped'));
    await go('#/job/nightly');
  }
}

/** A job may be known before the fleet. */
async function jobFirst() {
  if (!own) return;
  await tab(url, token, async () => {
    await page.evaluateOnNewDocument(() => {
      const real = window.fetch;
      window.fetch = async (to, init) => {
        if (/\/instances$/.test(to)) await new Promise((r) => setTimeout(r, 1500));
        return real(to, init);
      };
    });
    await page.goto(`${url}/#/job/quick`);
    await page.reload({ waitUntil: 'domcontentloaded' });
    await until('its next run', () => /next in/.test(document.querySelector('.sub')?.textContent));
    await until('the verdict of the fleet', () => document.querySelector('.hd .btn:not([aria-disabled=true])'));
  });
  saw('a job before the fleet');
}

/** What is drawn is asked for, and drawn when it changes; and each key counts. */
async function timeline() {
  await go('#/overview');
  for (const [by, wanted] of [['', ['runs?', 'plan?']], ['&by=instances', ['runs?']]]) {
    const asked = [];
    const note = (r) => asked.push(r.url());
    page.on('request', note);
    await go(`#/timeline?z=6h${by}`);
    await until('the timeline', () => document.querySelector('.tl canvas'));
    for (const end = Date.now() + GENEROUS; !wanted.every((w) => asked.some((url) => url.includes(`/api/v1/${w}`)));) {
      if (Date.now() > end) throw new Error(`the timeline asks for no ${wanted} in ${GENEROUS} ms`);
      await pause(50);
    }
    page.off('request', note);
    await settled();
    // A run that begins or ends draws, too.
    const frames = await page.evaluate(async () => {
      const real = window.requestAnimationFrame;
      const found = [];
      for (let i = 0; i < 3; i += 1) {
        let n = 0;
        window.requestAnimationFrame = (f) => { n += 1; return real(f); };
        await new Promise((r) => setTimeout(r, 2000));
        found.push(n);
      }
      window.requestAnimationFrame = real;
      return Math.min(...found);
    });
    if (frames > 20) troubles.push(`the timeline${by} is drawn ${frames} times in two seconds in which nothing happens`);
  }
  await go('#/timeline?z=6h');
  await page.evaluate(() => {
    for (let i = 0; i < 4; i += 1) dispatchEvent(new KeyboardEvent('keydown', { key: '+', bubbles: true }));
  });
  saw(`four times closer: ${await until('the zoom', () => /z=2[23]m/.exec(location.hash)?.[0])}`);
  // Of more runs than fit into an answer another window may have others.
  await go('#/overview');
  await page.evaluate(() => {
    const real = window.fetch;
    window.asked = 0;
    window.answers = () => { window.fetch = real; };
    window.fetch = (to, init) => {
      window.asked += /v1\/runs\?/.test(to);
      return real(String(to).replace('limit=5000', 'limit=3'), init);
    };
  });
  await go('#/timeline?z=6h&by=instances');
  await until('that runs are left out', () => /more runs\s+than can be shown/.test(document.querySelector('.note')?.textContent));
  await pause(1000);
  const before = await page.evaluate(() => window.asked);
  if (before > 4) troubles.push(`an answer that was cut is asked for ${before} times`);
  for (let i = 0; i < 3; i += 1) await page.keyboard.press('ArrowLeft');
  await until('the next question', (n) => window.asked > n, before);
  await page.evaluate(() => window.answers());
  // By instances: what events tell is drawn, without asking for the history.
  await go('#/timeline?z=2m&by=instances');
  await until('the timeline', () => document.querySelector('.tl canvas'));
  await page.evaluate(() => {
    const opened = Date.now();
    const draw = CanvasRenderingContext2D.prototype;
    const real = draw.roundRect;
    window.began = [];
    draw.roundRect = function at(x, ...rest) {
      const [room, left] = [document.querySelector('.tl').clientWidth - 176, x - 176];
      const since = Date.now() - opened + (left / room - 2 / 3) * 120_000;
      if (left > 0 && since > 2000) window.began.push(since);
      return real.call(this, x, ...rest);
    };
    window.drawsAgain = () => { draw.roundRect = real; };
  });
  const since = await until('a run that began later, by instances', () => window.began[0] && Math.round(window.began[0]));
  saw(`by instances: a run that began ${since} ms after the timeline was opened`);
  await page.evaluate(() => window.drawsAgain());
}

/** Who leaves a screen leaves no listener behind. */
async function nothingLeft() {
  const cdp = await page.createCDPSession();
  const counts = [];
  // What a browser frees late is freed late each time.
  for (const rounds of [3, 5, 5]) {
    for (let i = 0; i < rounds; i += 1) {
      for (const screen of ['timeline', 'timeline?by=instances', 'load', 'job/quick']) {
        await go(`#/${screen}`);
        await settled();
      }
    }
    await go('#/overview');
    await settled();
    await cdp.send('HeapProfiler.collectGarbage');
    counts.push((await page.metrics()).JSEventListeners);
  }
  await cdp.detach();
  saw(`listeners, after 3, 8, and 13 visits of four screens: ${counts.join(', ')}`);
  if (counts[2] - counts[1] >= 5) troubles.push(`each visit leaves listeners behind: ${counts.join(', ')}`);
}

/** The words around what is drawn. */
async function maps() {
  await go('#/timeline');
  await until('the legend', () => [...document.querySelectorAll('.legend span')].some((s) => s.textContent === 'cancelled'));
  await go('#/load?day=2030-03-04');
  const crowded = () => /04:30: \d+\sjobs\sstart\s+in\s+one\s+minute/.exec(document.querySelector('.sug')?.textContent)?.[0];
  saw(`a Monday: “${await until('advice', crowded)}”`);
  await go('#/load?day=2030-03-05');
  const spread = () => /same second.*The fullest minute.*/s.exec(document.querySelector('.sug')?.textContent)?.[0].replace(/\s+/g, ' ');
  saw(`a Tuesday: “${await until('no advice', spread)}”`);
}

/** What somebody typed wrongly into the address. */
async function wrongAddresses() {
  await go('#/constructor');
  await until('that there is no such screen', () => /no such screen/.test(document.querySelector('main').textContent));
  await go('#/load?day=2026-99-99');
  await settled();
  if ((await text('main')).includes('NaN')) troubles.push('a day that is none is shown');
  let first;
  for (const [week, today] of [[0, true], [1, false], [-5, true]]) {
    await go(`#/calendar?week=${week}`);
    await until('the calendar', () => document.querySelector('.week th[scope=col]'));
    await settled();
    if ((await text('.week thead')).includes('today') !== today) troubles.push(`the calendar of week ${week}, today: ${!today}`);
    first ??= await text('.sub');
    if (today !== (await text('.sub') === first)) troubles.push(`the calendar of week ${week} is of ${await text('.sub')}`);
  }
  await go('#/timeline?q=quick');
  await settled();
  const [chart, legend] = await page.evaluate(() => [document.querySelector('.tl-body canvas').getBoundingClientRect().bottom,
    document.querySelector('.legend').getBoundingClientRect().top]);
  if (chart > legend) troubles.push(`a timeline of one row ends at ${chart}, over the legend at ${legend}`);
  await go('#/job/quick?o=99999999999999999999');
  await until('the job', () => document.querySelector('h1')?.textContent === 'quick');
  await settled();
  if (await page.$('.side')) troubles.push('an occurrence at no time is shown');
}

async function drain() {
  await closed();
  await go('#/instances');
  await until('instances', () => document.querySelector('.inst tbody tr'));
  const columns = await page.$$eval('.inst thead th', (all) => all.map((th) => th.textContent));
  if (!/^Instance,Running,Last seen,/.test(columns)) troubles.push(`the columns of instances: ${columns}`);
  const lost = await page.evaluate(async () => {
    const [{ known }, { verdict }] = await Promise.all([import('./static/store.js'), import('./static/overview.js')]);
    const was = known.instances;
    known.instances = { ...was, instances: [...was.instances, { instance: 'x', silent: true }] };
    const said = verdict();
    known.instances = was;
    return said;
  });
  if (!/1\sinstance is not heard from/.test(lost)) troubles.push(`the headline hides a lost instance: “${lost}”`);
  await until('who won', () => [...document.querySelectorAll('.inst td.i-w')].some((td) => /[1-9]/.test(td.textContent)));
  await click('Drain', '.inst tbody');
  await click('Drain it', 'dialog[open]');
  await until('the drain', () => /draining/.test(document.querySelector('.inst tbody')?.textContent));
  saw('an instance drains');
  await closed();
  // The palette offers what was typed, and never the opposite.
  for (const [typed, no] of [['undrain', /^drain /], ['drain', /^undrain /]]) {
    await ctrlK();
    await page.keyboard.type(typed);
    await until(`the offer to ${typed}`, (t) => [...document.querySelectorAll('#offers [role=option]')].some((o) =>
      o.textContent.startsWith(`${t} `)), typed);
    const offers = await page.$$eval('#offers [role=option]', (all) => all.map((o) => o.textContent));
    if (offers.some((o) => no.test(o))) troubles.push(`who typed ${typed} is offered ${offers}`);
    await page.keyboard.press('Escape');
    await closed();
  }
  // Also of more instances than it shows.
  const offers = [];
  for (const typed of ['undrain', 'web-10 drain', 'und', 'drai web-10']) {
    await ctrlK();
    await until('the palette', () => document.querySelector('.pal input'));
    // Without an event in between, which would bring the real ones.
    offers.push(await page.evaluate(async (t) => {
      const { known } = await import('./static/store.js');
      const was = known.instances;
      known.instances = { ...was, instances: Array.from({ length: 12 }, (_, i) => ({ ...was.instances[0],
        instance: `web-${i}`, draining: i === 10 })) };
      const input = document.querySelector('.pal input');
      input.value = t;
      input.dispatchEvent(new Event('input', { bubbles: true }));
      for (let i = 0; i < 50; i += 1) await null;
      const found = [...document.querySelectorAll('#offers [role=option] bdi')].map((o) => o.textContent);
      known.instances = was;
      return found;
    }, typed));
    await page.keyboard.press('Escape');
    await closed();
  }
  if (offers[0][0] !== 'undrain web-10' || offers[1].join() !== 'web-10' || offers[2][0] !== 'undrain web-10'
    || offers[3].join() !== 'web-10') troubles.push(`of twelve instances the palette offers ${JSON.stringify(offers)}`);
  await click('Undrain', '.inst tbody');
  await click('Undrain it', 'dialog[open]');
  await until('the end of it', () => !/draining/.test(document.querySelector('.inst tbody')?.textContent));
  saw('it claims again');
  await closed();
  if (!own) return;
  await go('#/job/nightly');
  await until('the job', () => document.querySelector('h1')?.textContent === 'nightly');
  for (const name of NAMES) own.soloist('drain', name);
  await until('that nothing starts', () => /Nothing starts until an instance is undrained/.test(document.querySelector(
    '.notes')?.textContent) && /planned for/.test(document.querySelector('.sub').textContent));
  await go('#/instances');
  await until('that all drain', () => /all of them drain, so nothing starts/.test(document.querySelector('h1')?.textContent));
  for (const screen of ['timeline', 'calendar']) {
    await go(`#/${screen}`);
    await until(`that nothing starts, on the ${screen}`, () => /^Nothing starts until an instance is undrained/.test(
      document.querySelector('.note')?.textContent));
  }
  await go('#/overview');
  saw(`all drain: “${await until('the verdict', () => /^Nothing starts until.*/.exec(document.querySelector(
    '.verdict')?.textContent)?.[0])}”`);
  for (const name of NAMES) own.soloist('undrain', name);
  await until('that jobs start again', () => !/^Nothing starts/.test(document.querySelector('.verdict')?.textContent));
}

async function eventsSeen() {
  // Only rows that are seen are drawn, so each is filtered for.
  const acts = ['triggered', 'paused', 'resumed', 'drains', 'claims again'].map((kind) => ['#/events?f=acts', kind]);
  for (const [hash, kind] of [...acts, ['#/events?q=talks%20cancelled', 'cancelled']]) {
    await go(hash);
    await until(`the event ${kind}`, (k) => document.querySelector('.ev')?.textContent.includes(k), kind);
  }
  await go('#/events?q=quick');
  await until('ends without their starts', () => {
    const rows = [...document.querySelectorAll('.ev tbody tr')].map((tr) => tr.textContent);
    return rows.filter((t) => /succeeded/.test(t)).length > 1 && rows.filter((t) => /started on/.test(t)).length <= 1;
  });
  // One that comes late stands where it happened; one that comes much later is news.
  const order = await page.evaluate(async () => {
    const { place } = await import('./static/store.js');
    const list = [];
    for (const at of [1000, 3000, 2000, 9000, 500]) place(list, { at: new Date(at).toISOString() });
    return list.map((event) => Date.parse(event.at)).join();
  });
  if (order !== '500,9000,3000,2000,1000') throw new Error(`events in the order ${order}`);
  // What runs tell pushes no act out of the list.
  const stay = await page.evaluate(async () => {
    const { known, feed } = await import('./static/store.js');
    const was = [...known.feed];
    const at = (i) => new Date(Date.UTC(2030, 0, 1) + i * 10).toISOString();
    for (let i = 0; i < 3; i += 1) feed({ kind: 'paused', cursor: `a${i}`, at: at(i), data: {} });
    for (let i = 3; i < 5000; i += 1) feed({ kind: 'ended', cursor: `a${i}`, at: at(i), data: {} });
    const found = [known.feed.filter((e) => /^a[0-2]$/.test(e.cursor)).length, known.feed.length <= 2000];
    known.feed = was;
    return found.join();
  });
  if (stay !== '3,true') throw new Error(`of three acts before 5,000 runs the page keeps ${stay}`);
  // What was told while the page heard nothing is asked for, and nothing is shown twice.
  const feeds = await page.evaluate(async () => {
    const { known, feed, joined } = await import('./static/store.js');
    const e = (cursor, at) => ({ cursor, at: new Date(Date.UTC(2030, 0, 1) + at * 60_000).toISOString() });
    const of = (list) => list.map((event) => event.cursor).join(' ');
    const was = known.feed;
    known.feed = [];
    for (const n of [1, 2, 2, 1]) feed(e(`a.${n}`, n));
    const twice = of(known.feed);
    known.feed = was;
    const told = { events: [e('a.2', 2), e('a.4', 4), e('a.5', 5)], cursor: 'a.7' };
    return [twice, of(joined([e('a.6', 6), e('a.3', 3), e('a.2', 2)], told)), of(joined([e('b.9', 3), e('b.8', 1)], told)),
      of(joined([e('b.9', 3)], { events: [], cursor: 'a.0' })), of(joined([], told)),
      of(joined([e('b.9', 3)], { events: [{ ...e('a.1', -9999), kind: 'undelivered' }], cursor: 'a.1' }))];
  });
  if (feeds.join() !== 'a.2 a.1,a.6 a.5 a.4 a.3 a.2,a.5 a.4 a.2 a.0 b.8,a.0 b.9,a.5 a.4 a.2,a.1 a.0 b.9') throw new Error(`feeds: ${feeds.join()}`);
  // An instance that is gone for good is no outage that goes on.
  const bands = await page.evaluate(async () => {
    const [{ known }, { fleetMarks }] = await Promise.all([import('./static/store.js'), import('./static/timeline_data.js')]);
    const was = [known.feed, known.instances];
    const e = (kind, instance, at) => ({ kind, instance, at: new Date(at).toISOString() });
    const found = [];
    const of = (...list) => {
      known.feed = list.reverse();
      found.push(fleetMarks().bands.map((b) => `${b.instance} ${b.from}-${b.to}`).join() || 'none');
    };
    known.instances = { instances: [{ instance: 'here', silent: false }, { instance: 'mute', silent: true }] };
    of(e('instance_gone', 'x', 1));
    of(e('instance_silent', 'x', 1), e('instance_gone', 'x', 3));
    of(e('instance_gone', 'here', 1), e('instance_up', 'here', 4));
    of(e('instance_silent', 'here', 1));
    of(e('instance_silent', 'mute', 2));
    [known.feed, known.instances] = was;
    return found.join('; ');
  });
  if (bands !== 'none; x 1-3; here 1-4; none; mute 2-null') throw new Error(`outages: ${bands}`);
  // The lateness beside a run is that of its occurrence.
  const late = await page.evaluate(async () => {
    const { lateOf } = await import('./static/overview.js');
    const t = (s) => new Date(s * 1000).toISOString();
    const r = (s, attempt, lateness_ms) => ({ occurrence: t(s), attempt, lateness_ms });
    const run = (attempt) => ({ occurrence: t(9), attempt, started_at: t(10) });
    const recent = [r(8, 0, null), r(7, 2, null), r(7, 1, 70), r(6, 1, 60)];
    return [lateOf({ running: [run(1)], recent }), lateOf({ running: [run(2)], recent }),
      lateOf({ running: [], last: r(7, 2), recent }), lateOf({ running: [], last: r(5, 1), recent }),
      lateOf({ running: [] })].join();
  });
  if (late !== '1000,-1,70,-1,-1') throw new Error(`latenesses: ${late}`);
  saw('each act as an event');
}

/** A description of a page's length leaves the page to what it is for. */
async function described() {
  await go('#/job/hangs');
  await until('the beginning of its description', () => /waits…\s+all of it/.test(document.querySelector('.sub')?.textContent));
  await click('all of it', '.sub');
  await until('the whole', () => /the last word\./.test(document.querySelector('.sub').textContent));
  saw('a long description, when asked for');
}

/** A list longer than what is drawn in one frame, also while it changes in each frame. */
async function longLists() {
  const found = await page.evaluate(async () => {
    const { html, render, useRef } = await import('./static/base.js');
    const { Memo, useSeen } = await import('./static/parts.js');
    const place = document.body.appendChild(document.createElement('div'));
    place.style.cssText = 'position: fixed; inset: 0';
    function List({ tops, n }) {
      const body = useRef();
      const [from, to, ready] = useSeen(tops, body);
      const rows = Array.from({ length: to - from }, (_, i) => html`<${Memo} key=${from + i} waits=${from + i >= ready}
        same=${[n]} draw=${() => html`<p>${n}</p>`} />`);
      return html`<div ref=${body}>${rows}</div>`;
    }
    // As many rows as are drawn at most: all are in the window.
    const draw = (n) => render(html`<${List} n=${n} tops=${Array.from({ length: 65 }, (_, i) => i * 4)} />`, place);
    const frame = () => new Promise(requestAnimationFrame);
    const rows = () => [...place.querySelectorAll('p')].map((row) => Number(row.textContent));
    const all = async (fits) => {
      for (let i = 0; i < 100; i++) {
        if (rows().length === 64 && rows().every(fits)) return i;
        await frame();
      }
      return `${rows()}`;
    };
    draw(1);
    const first = await all((n) => n === 1);
    draw(2);
    const another = await all((n) => n === 2);
    for (let n = 3; n < 40; n++) {
      draw(n);
      await frame();
    }
    const changing = rows().length === 64 && rows().every((n) => n > 2);
    const last = await all((n) => n === 39);
    render(null, place);
    place.remove();
    return { first, another, changing, last };
  });
  const ended = [found.first, found.another, found.last].every(Number.isInteger);
  if (!ended || found.another < 4 || !found.changing) throw new Error(`rows of a long list: ${JSON.stringify(found)}`);
  saw(`each row of a long list is drawn, in ${found.another} frames`);
}

async function hostileOutput() {
  const { runs } = await api('jobs/hostile/runs?limit=1');
  if (!runs?.length) return saw('hostile has not run yet');
  await go(`#/job/hostile?o=${Date.parse(runs[0].occurrence)}`);
  const out = await until('its output', () => document.querySelector('.outw pre')?.textContent.includes('script')
    && document.querySelector('.outw pre').textContent);
  if (await page.evaluate(() => window.pwned
    || document.querySelector('.outw script'))) throw new Error('the output was run');
  return saw(`hostile output as text: ${JSON.stringify(out)}`);
}

async function storeAway() {
  const { SOLOIST_DOWN, SOLOIST_UP } = process.env;
  const by = (command) => command && (() => execSync(command, { stdio: 'inherit' }));
  const [down, up] = own ? [own.storeAway, own.storeBack] : [by(SOLOIST_DOWN), by(SOLOIST_UP)];
  if (!down || !up) return;
  await go('#/overview');
  saw(`what fails again and again: “${await until('how often', () => /[Ff]ailed \d+.*? of the last \d+/.exec(
    document.querySelector('.att')?.textContent)?.[0])}”`);
  down();
  saw(`the store away: “${await until('the alert', () =>
    document.querySelector('.banner')?.textContent.trim())}”, “${await text('.verdict')}”`);
  await go('#/job/talks');
  const said = await until('what is said of its runs', () => /nobody can say what ran|nothing (has run )?yet/i.exec(
    document.querySelector('main').textContent)?.[0]);
  if (/nothing/i.test(said)) troubles.push('without the store, a job that ran counts as one that did not');
  await go('#/instances');
  const reach = await until('since when the store is away', () => /Out of reach(not|now|.*? for )/.exec(
    document.querySelector('main').textContent)?.[1]);
  if (reach !== 'now') troubles.push(`the store is away, and out of reach “${reach}”`);
  // On a screen of this width each column is seen.
  await page.setViewport({ width: 1280, height: 900 });
  const wide = await page.evaluate(async () => {
    const { known, changed } = await import('./static/store.js');
    known.instances.instances[0].running = [{ job: 'a-job-with-a-rather-long-name-of-fifty-characters-x',
      occurrence: '2026-01-01T00:00:01.000Z' }];
    changed('instances');
    await new Promise((r) => { setTimeout(r, 200); });
    return document.querySelector('table.inst').getBoundingClientRect().right
      - document.querySelector('.sub').getBoundingClientRect().right;
  });
  if (wide > 0.5) troubles.push(`the table of instances is ${wide} pixels wider than the page`);
  await page.setViewport({ width: 1440, height: 900 });
  await go('#/job/talks');
  up();
  await until('the alert to go', () => !document.querySelector('.banner'));
  await until('its history, without a click', () => document.querySelector('.hist tbody tr'));
  saw('the store is back, without loading the page again');
}

/** A history that cannot be had for a while: what was known of it stays. */
async function historyRefused() {
  await go('#/job/quick');
  await until('its charts', () => document.querySelector('.plot canvas'));
  await page.evaluate(() => {
    const real = window.fetch;
    window.answers = () => { window.fetch = real; };
    window.fetch = (to, init) => (/\/runs\?/.test(to) ? Promise.resolve(new Response('{"detail": "not now"}',
      { status: 503 })) : real(to, init));
  });
  await until('the refusal', () => document.querySelector('main [role=alert]')?.textContent.includes('not now'));
  if (!await page.$('.plot canvas')) throw new Error('the charts of a job go when its history cannot be had');
  await page.evaluate(() => window.answers());
  await until('the history', () => !document.querySelector('main [role=alert]'));
  saw('charts stay while the history cannot be had');
}

async function takeover() {
  if (!own && process.env.SOLOIST_KILL !== '1') return;
  const { instance: mine } = await api('session');
  for (let i = 0; i < 12; i++) {
    await go('#/job/survives');
    await until('the job', () => document.querySelector('h1')?.textContent === 'survives');
    await click('Trigger', '.hd');
    await click('Trigger', 'dialog[open] .foot');
    await until('the run', () => document.querySelector('.notes a'));
    await closed();
    const run = await answered('its run', 'jobs/survives', (j) => j.running[0]);
    const holder = await answered('its holder', 'instances', (a) => a.instances.find((x) => x.instance === run.instance));
    if (holder.instance !== mine) {
      process.kill(holder.pid, 'SIGKILL');
      saw(`${holder.instance} is killed while it runs survives`);
      await page.click('.notes a');
      saw(`the takeover: ${await until('the takeover', () => [...document.querySelectorAll('.try li')].find((l) =>
        /takeover/.test(l.textContent))?.textContent)}`);
      own?.start(holder.instance);
      return;
    }
    await click('Cancel', '.hd');
    await click('Cancel what runs', 'dialog[open]');
    await until('its end', () => !document.querySelector('.notes'));
    await closed();
  }
  throw new Error('the instance that serves the page ran it each time');
}

const TYPES = { js: 'text/javascript', css: 'text/css', svg: 'image/svg+xml', html: 'text/html' };
/** Takes the page's files from a folder, so that a change of them needs no build. */
async function filesFrom(folder) {
  const policy = (await fetch(url)).headers.get('content-security-policy');
  await page.setRequestInterception(true);
  page.on('request', (r) => {
    const { pathname } = new URL(r.url());
    if (pathname !== '/' && !pathname.startsWith('/static/')) return r.continue();
    const name = pathname === '/' ? 'index.html' : pathname.slice('/static/'.length);
    return r.respond({ contentType: TYPES[name.split('.').pop()], headers: { 'Content-Security-Policy': policy },
      body: readFileSync(`${folder}/${name}`) });
  });
}

/** Opens another tab at this address, does `f` there, and closes it. */
async function tab(address, credential, f) {
  const before = page;
  const context = await browser.createBrowserContext();
  page = await context.newPage();
  await page.setViewport({ width: 1440, height: 900 });
  watch(address);
  if (process.env.PAGE_FILES) await filesFrom(process.env.PAGE_FILES);
  try {
    await page.goto(address, { waitUntil: 'domcontentloaded' });
    await type('.enter input', credential);
    await page.keyboard.press('Enter');
    await until('the overview', () => document.querySelector('.board tbody tr.row'));
    await f();
  } finally {
    await context.close();
    page = before;
  }
}

/** An instance that gives no stream, because all are taken, is not one that does not answer. */
async function streamsTaken() {
  if (!own) return;
  await tab(url, token, async () => {
    await page.evaluateOnNewDocument(() => {
      const real = window.fetch;
      const taken = JSON.stringify({ detail: 'all streams are open', hint: 'close one' });
      window.fetch = (to, init) => (/\/events$/.test(to) ? Promise.resolve(new Response(taken, { status: 503 }))
        : real(to, init));
    });
    await page.reload({ waitUntil: 'domcontentloaded' });
    const said = await until('the alert', () => document.querySelector('.banner')?.textContent.trim());
    if (/not answer/.test(said) || !/all streams are open: close one/.test(said)) {
      troubles.push(`all streams are taken: “${said}”`);
    }
    saw(`all streams are taken: “${said}”`);
  });
}

/** Short words that stand in two lines, as “No” and “v”. */
function brokenWords() {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT, (n) => (n.parentElement.closest(
    'pre, script, style') ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT));
  const found = [];
  while (texts.nextNode()) {
    for (const word of texts.currentNode.data.matchAll(/(?<!\p{L})\p{L}{2,12}(?!\p{L})/gu)) {
      const range = document.createRange();
      range.setStart(texts.currentNode, word.index);
      range.setEnd(texts.currentNode, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].filter((r) => r.width).map((r) => Math.round(r.top)));
      if (lines.size > 1) found.push(word[0]);
    }
  }
  return found;
}

/** On a phone each day keeps its number in one line, and each date its name. */
async function narrowJob() {
  await go('#/job/quick');
  await page.setViewport({ width: 390, height: 844 });
  const high = await until('the days', () => {
    const all = [...document.querySelectorAll('.days > * > span')];
    return all.length === 30 && all.filter((s) => s.offsetHeight > 14 || getComputedStyle(s).whiteSpace !== 'nowrap')
      .map((s) => s.textContent).concat(['']);
  });
  if (high.length > 1) troubles.push(`days of a job on a phone are broken: ${high}`);
  const names = await page.evaluate(() => [...document.querySelectorAll('.hist-bar label')].map((l) =>
    l.innerText.trim()));
  if (names.join() !== 'From,To') troubles.push(`the dates of the history are named “${names}”`);
  // The days are narrowest where an occurrence is open beside them.
  const [last] = await answered('a run', 'jobs/quick/runs?limit=1', (a) => a.runs?.length && a.runs);
  await go(`#/job/quick?o=${Date.parse(last.occurrence)}`);
  await until('the occurrence', () => document.querySelector('.side .why'));
  for (const width of [320, 340, 390, 700, 800, 900, 1000, 1100, 1200, 1300, 1440]) {
    await page.setViewport({ width, height: 900 });
    await settled();
    const broken = await page.evaluate(brokenWords);
    if (broken.length) troubles.push(`words of a job are broken at a width of ${width}: ${broken}`);
    const wide = await page.evaluate(() => {
      // As long as a name of an instance may be.
      document.querySelectorAll('.hist tbody .h-on').forEach((on) => { on.firstChild.textContent = 'x'.repeat(100); });
      return document.scrollingElement.scrollWidth;
    });
    if (wide > width) troubles.push(`a job is ${wide} pixels wide in a window of ${width}`);
  }
  saw(`the days and dates of a job on a phone: ${names}`);
}

/** Whoever may only look is told why, and no button, key or command of the palette asks for anything. */
async function looksOnly() {
  const reason = await until('the mark', () => document.querySelector('.top .tag')?.textContent.includes('read only')
    && document.querySelector('.top .tag').getAttribute('data-tip'));
  await go('#/job/talks');
  await until('the job', () => document.querySelector('h1')?.textContent === 'talks');
  const buttons = await until('its buttons', () => {
    const all = [...document.querySelectorAll('.hd button')].filter((b) => /Trigger|Pause|Skip|Cancel/.test(b.textContent
      + b.getAttribute('aria-label')));
    return all.length > 1 && all.map((b) => b.getAttribute('aria-disabled'));
  });
  if (buttons.some((b) => b !== 'true')) throw new Error('a button of somebody who may only look is on');
  await page.evaluate(() => document.querySelectorAll('.hd button').forEach((b) => b.click()));
  for (const key of ['t', 'p']) await page.keyboard.press(key);
  await settled();
  const dialog = await page.evaluate(() => {
    const open = document.querySelector('dialog[open]');
    return open && [...open.querySelectorAll('button')].some((b) => /^(Trigger|Pause)/.test(b.textContent.trim())
      && !b.disabled && b.getAttribute('aria-disabled') !== 'true');
  });
  if (dialog) throw new Error('a dialog lets somebody act who may only look');
  const status = await page.evaluate(async () => (await fetch('api/v1/jobs/talks/trigger', { method: 'POST', body: '{}',
    headers: { Authorization: `Bearer ${sessionStorage.getItem('soloist-token')}`,
      'Content-Type': 'application/json' } })).status);
  if (status !== 403) throw new Error(`a trigger by somebody who may only look was answered with ${status}`);
  return reason;
}

async function readers() {
  if (!own) return;
  await tab(own.url.a, own.tokens.read, async () => saw(`a token to read: “${await looksOnly()}”`));
  await tab(own.url.c, own.tokens.operate, async () => saw(`an instance to read: “${await looksOnly()}”`));
}

/** Somebody gives a token another role: the page knows it without a reload. */
async function otherRole() {
  if (!own) return;
  const file = readFileSync(own.tokensFile, 'utf8');
  // At once: of a file that is empty for a moment the page learns by another way.
  const put = (text) => {
    writeFileSync(`${own.tokensFile}.new`, text, { mode: 0o600 });
    renameSync(`${own.tokensFile}.new`, own.tokensFile);
  };
  const button = (what, off) => until(what, (o) => [...document.querySelectorAll('.hd button')].some((b) =>
    b.textContent.startsWith('Trigger') && (b.getAttribute('aria-disabled') === 'true') === o), off);
  await tab(own.url.a, own.tokens.read, async () => {
    await go('#/job/talks');
    await button('a button that is off', true);
    put(file.replace(/^(\S+) read /m, '$1 operate '));
    await button('a button that is on', false);
    put(file);
    await button('a button that is off again', true);
  });
  saw('a token with another role, without a reload');
}

/** What is shown for copying is understood, whatever the names are. */
async function commandLines() {
  await go('#/overview');
  const lines = await page.evaluate(async () => {
    const { commandLine } = await import('./static/format.js');
    return [commandLine('trigger', ['quick'], { '--key': 'page-1' }), commandLine('trigger', ['-q'], { '--key': '-k' }),
      commandLine('pause', ['a'], { '--reason': "it's\n$(id)" }), commandLine('skip', ['-q'], { '-n': '1' }),
      commandLine('trigger', ['a'], { '--key': '=ls' }), commandLine('why', ['--help', '2026-01-01T00:00:00Z'])];
  });
  const wanted = ['soloist trigger quick --key page-1', 'soloist trigger --key=-k -- -q',
    `soloist pause a --reason 'it'\\''s\n$(id)'`, 'soloist skip -n 1 -- -q',
    `soloist trigger a --key '=ls'`, 'soloist why -- --help 2026-01-01T00:00:00Z'];
  if (lines.join('|') !== wanted.join('|')) throw new Error(`command lines: ${lines.join('|')}`);
  saw('command lines for copying');
}

/** Words of people and of a configuration, wherever they are shown. */
async function hostileWords() {
  if (!own) return;
  const evil = '<img src=x onerror=window.pwned=1> \u202egnp.exe';
  const refused = await page.evaluate(async (reason) => {
    const long = { reason: `${reason} ${'x'.repeat(900)}` };
    for (const [path, body] of [['trigger', { key: reason }], ['pause', long]]) {
      const answer = await fetch(`api/v1/jobs/hostile/${path}`, { method: 'POST', body: JSON.stringify(body),
        headers: { Authorization: `Bearer ${sessionStorage.getItem('soloist-token')}`,
          'Content-Type': 'application/json' } });
      if (!answer.ok) return answer.text();
    }
    return null;
  }, evil);
  if (refused) throw new Error(refused);
  const isText = async (where) => {
    await until(`the words in ${where}`, () => document.querySelector('main').textContent.includes(
      'onerror=window.pwned=1> \\u{202e}gnp.exe'));
    if (await page.evaluate(() => window.pwned || document.querySelector('main img, main script')
      || /\u202e/.test(document.body.innerText))) throw new Error(`what somebody wrote was run, in ${where}`);
  };
  // What stands above the table is held while the pointer is in the table.
  await page.mouse.move(5, 300);
  for (const hash of ['#/overview', '#/job/hostile', '#/events?q=hostile']) {
    await go(hash);
    await isText(hash);
    const wide = await page.evaluate(() => document.documentElement.scrollWidth
      - document.documentElement.clientWidth);
    if (wide > 1) troubles.push(`long words make ${hash} ${wide} pixels wider than its window`);
  }
  for (const hash of ['#/timeline', '#/calendar', '#/wall', '#/load']) {
    await go(hash);
    await settled();
    if (await page.evaluate(() => window.pwned || document.querySelector('main img, main script')
      || /\u202e/.test(document.body.innerText))) throw new Error(`what somebody wrote was run, in ${hash}`);
  }
  own.soloist('resume', 'hostile');
  saw('hostile words of people as text');
}

const hide = (hidden) => page.evaluate((h) => {
  Object.defineProperty(document, 'hidden', { configurable: true, get: () => h });
  document.dispatchEvent(new Event('visibilitychange'));
}, hidden);

/** A page that nobody sees lets go of its stream, asks now and then instead, and is live again once it is seen. */
async function unseen() {
  if (!own) return;
  await go('#/overview');
  const streams = async () => {
    const metrics = await fetch(`${url}/metrics`, { headers: { Authorization: `Bearer ${token}` } });
    return Number(/^soloist_http_streams (\d+)$/m.exec(await metrics.text())[1]);
  };
  const untilStreams = async (n, what) => {
    for (const end = Date.now() + GENEROUS; await streams() !== n; await pause(100)) {
      if (Date.now() > end) throw new Error(`waited in vain for ${what}`);
    }
  };
  await untilStreams(1, 'the stream of the page');
  await hide(true);
  await untilStreams(0, 'the end of the stream of a page that nobody sees');
  own.soloist('pause', 'nightly', '--reason', 'nobody looks');
  await until('the pause, without a stream', () => document.querySelector('tr[data-job=nightly] .x-paused'));
  if (await streams()) throw new Error('a page that nobody sees has a stream');
  own.soloist('resume', 'nightly');
  await hide(false);
  await untilStreams(1, 'the stream of a page that is seen again');
  await until('the end of the pause', () => !document.querySelector('tr[data-job=nightly] .x-paused'));
  saw('a page that nobody sees lets go of its stream, and takes it up again');
}

/** The instance that serves the page dies, and comes back. */
async function lostInstance() {
  if (!own) return;
  await go('#/overview');
  await until('rows', () => document.querySelector('.board tbody tr.row'));
  await own.kill('a');
  saw(`the instance is lost: “${await until('the alert', () => /lost its instance/.test(document.querySelector(
    '.banner')?.textContent) && document.querySelector('.banner').textContent.trim())}”`);
  await page.focus('.board tr.row th a');
  await until('buttons', () => document.querySelector('.board [aria-label^=Trigger]'));
  const on = await page.evaluate(() => document.querySelectorAll(
    ':is([aria-label^=Trigger],[aria-label^=Pause]):not([aria-disabled=true])').length);
  if (on) throw new Error(`without its instance: ${on} buttons that are on`);
  own.start('a');
  await until('the alert to go', () => !document.querySelector('.banner'));
  await until('live rows', () => /answers in/.test(document.querySelector('.sub')?.textContent));
  saw('it is back, without loading the page again');
  // The list stays as it is while the pointer is on it.
  await page.mouse.move(5, 300);
  await go('#/events?f=fleet');
  await until('that events may be lacking', () => /started again: events just before/.test(document.querySelector(
    '.ev')?.textContent));
}

/** The instance that serves the page is stopped: its connections stay, and nothing comes. */
async function silentInstance() {
  if (!own) return;
  await go('#/overview');
  await until('rows', () => document.querySelector('.board tbody tr.row'));
  for (const unlooked of [false, true]) {
    await hide(unlooked);
    own.stop('a');
    const told = await until('the alert', () => /lost its instance/.test(document.querySelector('.banner')?.textContent)
      && document.querySelector('.banner').textContent.trim());
    // It was silent long before, and both figures say so.
    if (/less than|for [0-9]\s*s\b/.test(told)) troubles.push(`a page that heard nothing for a while says “${told}”`);
    own.goOn('a');
    await hide(false);
    await until('the alert to go', () => !document.querySelector('.banner'));
    saw(`a silent instance${unlooked ? ', of a page that nobody sees' : ''}: “${told}”`);
  }
}

/** The first answer has one run of each job; no event says more of one that does not run now. */
async function allRuns() {
  if (!own) return;
  for (const n of [1, 2]) {
    own.soloist('trigger', 'nightly');
    await answered('a run', 'jobs/nightly', (job) => job.recent.length >= n);
  }
  await tab(url, token, async () => {
    const label = await until('all runs of a job', () => {
      const words = document.querySelector('tr[data-job=nightly] svg.st').ariaLabel;
      return Number(/^Last (\d+):/.exec(words)?.[1]) > 1 && words;
    });
    saw(`after the last run of each job the others come, too: “${label}”`);
  });
}

/** In windows between those of a phone and of a desk names have room, and nothing is beside the window. */
async function middleWidths() {
  for (const hash of ['#/overview', '#/instances']) {
    await go(hash);
    for (const width of [...(hash === '#/instances' ? [360, 640] : []), 701, 820, 960, 1040]) {
      await page.setViewport({ width, height: 900 });
      await settled();
      const [wide, least] = await page.evaluate(() => [document.scrollingElement.scrollWidth, Math.min(1000,
        ...[...document.querySelectorAll('.board tr.row .c-n')].map((n) => n.clientWidth))]);
      if (wide > width || least < 120) throw new Error(`${hash} at ${width}: ${wide} wide, names have ${least}`);
      const over = await page.evaluate(() => {
        const [head, row] = ['thead th', 'tbody tr'].map((s) => document.querySelector(`main ${s}`)?.getBoundingClientRect());
        return head?.height > 1 && head.bottom > row.top + 1;
      });
      if (over) throw new Error(`${hash} at ${width}: the head of the table covers its first row`);
    }
  }
  await page.setViewport({ width: 1440, height: 900 });
  saw('in narrow windows names have room');
}

/** With a finger, the buttons of a row are there before it is pressed, or not at all. */
async function touched() {
  const shows = async (width) => {
    await page.setViewport({ width, height: 900, hasTouch: true });
    await go('#/overview');
    await page.reload();
    await appears('tr.row[data-job=quick]');
    return page.evaluate(() => [...document.querySelectorAll('tr.row[data-job=quick] .acts')].some((e) => e.offsetParent
      && getComputedStyle(e).opacity === '1'));
  };
  if (!await shows(1200)) throw new Error('a finger finds no buttons');
  if (await shows(820)) throw new Error('a finger finds buttons over the names');
  await page.setViewport({ width: 1440, height: 900 });
  await page.reload();
  await appears('tr.row[data-job=quick]');
  saw('a finger presses only what is seen');
}

/** A row that another job takes over keeps nothing of the one before. */
async function rowsTaken() {
  const motion = (value) => page.emulateMediaFeatures([{ name: 'prefers-reduced-motion', value }]);
  await motion('no-preference');
  const only = async (job) => {
    await page.evaluate((q) => { location.hash = `#/overview?q=${q}`; }, job);
    await until(`${job} alone`, (name) => document.querySelectorAll('tr.row').length === 1
      && document.querySelector('tr.row').dataset.job === name, job);
  };
  await only('quick');
  await page.hover('tr[data-job=quick]');
  await until('the buttons of a row', () => document.querySelector('tr[data-job=quick] .acts'));
  await page.evaluate(() => { window.kept = document.querySelector('tr.row'); });
  await only('talks');
  await settled();
  const now = await page.evaluate(() => {
    const row = document.querySelector('tr.row');
    return { same: row === window.kept, flash: row.classList.contains('flash'), acts: !!row.querySelector('.acts'),
      said: row.querySelector('th').textContent };
  });
  if (!now.same || now.flash || now.acts || !now.said.startsWith('talks')) {
    throw new Error(`of another job: ${JSON.stringify(now)}`);
  }
  // The one with the focus goes with its job.
  await only('quick');
  await page.focus('tr[data-job=quick] th a');
  await only('talks');
  if (await page.evaluate(() => !!document.activeElement.closest('tr'))) {
    throw new Error('the focus went to another job');
  }
  await motion('reduce');
  await go('#/overview');
  await until('more rows than one frame draws', () => document.querySelectorAll('tr.row').length > 8);
  await page.evaluate(() => { location.hash = '#/overview?sort=name'; });
  await until('each row in its place, with its own job', () => {
    const rows = [...document.querySelectorAll('tr.row')].map((row) => row.dataset.job);
    const said = [...document.querySelectorAll('tr.row th a')].map((a) => a.textContent);
    return rows.length > 8 && [rows, said].every((list) => list.join() === [...rows].sort().join());
  });
  await go('#/overview');
  saw('a row that is used again keeps nothing');
}

/** Whoever has the pointer in the table learns that what stands above it has changed. */
async function heldFacts() {
  if (!own) return;
  await go('#/overview');
  await appears('tr[data-job=talks]');
  const changed = () => page.evaluate(() => Number([...document.querySelectorAll('button')].map((button) => button
    .textContent.match(/^(\d+) changed, show$/)?.[1]).find(Boolean) ?? 0));
  const moved = () => page.evaluate(() => document.body.innerText.includes('while somebody looks'));
  const paused = (is) => until(`talks ${is ? '' : 'not '}paused`, (want) => document.querySelector('tr[data-job=talks]')
    .textContent.includes('paused') === want, is);
  let [before, after] = [0, 0];
  // Another job may come to need attention, or not, just then.
  for (let i = 0; i < 3 && after !== before + 1; i++) {
    own.soloist('resume', 'talks');
    await paused(false);
    await page.mouse.move(5, 5);
    await settled();
    await page.hover('tr[data-job=quick]');
    before = await changed();
    own.soloist('pause', 'talks', '--reason', 'while somebody looks');
    await paused(true);
    after = await changed();
    if (await moved()) throw new Error('what stands above the table has changed below the pointer');
  }
  if (after !== before + 1) throw new Error(`${before} changed, then ${after}`);
  await click(`${after} changed`);
  await until('the pause', () => document.body.innerText.includes('while somebody looks'));
  own.soloist('resume', 'talks');
  await page.mouse.move(5, 5);
  await paused(false);
  saw('what is held is counted');
}

/** All rows are printed, and what is selected is seen in colours that the system chose. */
async function printed() {
  await go('#/overview');
  await page.setViewport({ width: 1440, height: 120 });
  await appears('table.board');
  const all = Number(await page.evaluate(() => document.querySelector('table.board').ariaRowCount
    || document.querySelector('table.board').getAttribute('aria-rowcount'))) - 1;
  const rows = () => page.evaluate(() => document.querySelectorAll('.board tr.row, .board tr.grp').length);
  await page.evaluate(() => dispatchEvent(new Event('resize')));
  await settled();
  const some = await rows();
  await page.evaluate(() => dispatchEvent(new Event('beforeprint')));
  await settled();
  const [wants, has] = [all, await rows()];
  await page.evaluate(() => dispatchEvent(new Event('afterprint')));
  await page.setViewport({ width: 1440, height: 900 });
  await appears('tr[data-job=quick]');
  if (has !== wants || some >= has) throw new Error(`${some} of ${wants} rows are drawn, and ${has} printed`);
  await page.focus('tr[data-job=quick] th a');
  await page.waitForSelector('tr.sel', { timeout: GENEROUS });
  const devtools = await page.createCDPSession();
  const force = (value) => devtools.send('Emulation.setEmulatedMedia', { features: [{ name: 'forced-colors', value }, {
    name: 'prefers-reduced-motion', value: 'reduce' }] });
  await force('active');
  const style = await page.evaluate(() => getComputedStyle(document.querySelector('tr.sel')).outlineStyle);
  await force('');
  await devtools.detach();
  await page.evaluate(() => document.activeElement.blur());
  if (style !== 'solid') throw new Error(`the selected row has the outline ${style}`);
  saw('all rows are printed, and forced colours show what is selected');
}

/** Keys act on the job that has the focus, and on none that is not shown. */
async function keysOfShown() {
  await go('#/overview');
  await page.waitForSelector('tr[data-job=quick]', { timeout: GENEROUS });
  const focus = async () => {
    await page.focus('tr[data-job=quick] th a');
    await page.waitForSelector('tr.sel[data-job=quick]', { timeout: GENEROUS });
    await settled();
  };
  await focus();
  await page.keyboard.press('t');
  await until('a question', () => document.querySelector('dialog[open]')?.textContent.includes('quick'));
  await page.keyboard.press('Escape');
  await until('no question', () => !document.querySelector('dialog[open]'));
  await focus();
  await page.keyboard.press('/');
  await page.keyboard.type('talks');
  await until('the filter', () => !document.querySelector('tr[data-job=quick]'));
  await page.evaluate(() => document.activeElement.blur());
  await page.keyboard.press('t');
  await pause(300);
  if (await page.$('dialog[open]')) throw new Error('a key acted on a job that is not shown');
  await go('#/overview');
  saw('keys act on what is shown');
}

/** A page waits until its instance can read the file of tokens again. */
async function brokenTokens() {
  if (!own) return;
  await go('#/overview');
  const file = readFileSync(own.tokensFile);
  writeFileSync(own.tokensFile, 'broken');
  saw(`without tokens: “${await until('the alert', () => /file of tokens/.test(document.querySelector('.banner')
    ?.textContent) && document.querySelector('.banner').textContent.trim())}”`);
  await pause(6000);
  writeFileSync(own.tokensFile, file);
  await until('the page', () => !document.querySelector('.banner') && document.querySelector('.board tbody tr.row'));
  saw('with them again, without another token');
}

/** Two instances of different versions take turns behind one address. */
async function twoVersions() {
  if (!own) return;
  await tab(own.front.url, token, async () => {
    // A stream ends, the next goes to the other instance: it begins anew, and says of which version it is.
    await until('the offer of the new page', () => [...document.querySelectorAll('.top button')].some((b) =>
      b.textContent.includes('Load the new')) || fetch('api/v1/session').then(() => false));
    own.soloist('pause', 'nightly', '--reason', 'two versions');
    await until('the pause', () => document.querySelector('tr[data-job=nightly] .x-paused'));
    own.front.breakAll();
    own.soloist('resume', 'nightly');
    await until('the end of the pause', () => document.querySelector('tr[data-job=nightly]')
      && !document.querySelector('tr[data-job=nightly] .x-paused'));
    if (own.front.served.some((n) => n < 3)) throw new Error(`they served ${own.front.served} requests`);
    saw(`two versions behind one address served ${own.front.served} requests; the page offers to load itself anew`);
  });
}

/** For the pictures: something must have happened, and be going on. */
async function history() {
  own.soloist('pause', 'payroll-export', '--until', '3d', '--reason', 'the office moves');
  own.soloist('skip', 'sitemap', '-n', '1');
  await pause(Number(process.env.PICTURES_AFTER_S || 600) * 1000);
  // A holder dies while it runs the backup: a takeover.
  for (let killed = false; !killed; await pause(200)) {
    const { running: [run] } = await api('jobs/db-backup');
    if (run && run.instance !== NAMES[0]) {
      await own.kill(run.instance);
      own.start(run.instance);
      killed = true;
    }
  }
  await pause(60_000);
  // In the middle of a minute, with a retry ahead; the pointer on nothing.
  await page.mouse.move(700, 4);
  await pause(60_000 - Date.now() % 60_000 + 24_000);
}

const LOOKS = [['light', { width: 1440, height: 900 }], ['dark', { width: 1440, height: 900 }],
  ['phone', { width: 360, height: 844, deviceScaleFactor: 2, isMobile: true, hasTouch: true }]];

/** The pictures that the pages show. */
const SHOWN = ['overview-light', 'timeline-light', 'job-light'];

/** Each screen in each look, with axe-core. Gives the number of findings. */
async function looks() {
  const job = pictures ? 'invoice-run' : 'fails';
  const { runs } = await api(`jobs/${job}/runs?limit=50`);
  const bad = runs?.find((r) => r.outcome === 'failed');
  const screens = [['overview', '#/overview'], ['timeline', '#/timeline?z=1h'], ['timeline-instances',
    '#/timeline?z=1h&by=instances'], ['load', '#/load'], ['calendar', '#/calendar'],
    ['instances', '#/instances'], ['events', '#/events'], ['job', `#/job/${job}`], ['occurrence', `#/job/${job}?o=${bad
      ? Date.parse(bad.occurrence) : ''}`], ['wall', '#/wall']];
  let findings = 0;
  for (const [look, viewport] of LOOKS) {
    await page.setViewport(viewport);
    await page.emulateMediaFeatures([{ name: 'prefers-color-scheme', value: look === 'dark' ? 'dark' : 'light' }, {
      name: 'prefers-reduced-motion', value: 'reduce' }]);
    for (const [name, hash] of [...screens, ['palette', null], ['dialog', null], ['help', null]]) {
      if (hash) await go(hash);
      else await go('#/overview');
      if (name === 'palette') await ctrlK();
      if (name === 'help') await page.keyboard.press('?');
      if (name === 'dialog') await page.evaluate(() => import('./static/actions.js').then((m) => m.act('pause',
        document.querySelector('tr.row').dataset.job)));
      await settled();
      if (shots && (!pictures || SHOWN.includes(`${name}-${look}`))) await page.screenshot({ path: `${shots}/${name}-${look}.png` });
      findings += await axe(`${name}, ${look}`, look);
      if (!hash) await page.evaluate(() => document.querySelector('dialog[open]')?.close());
      const wide = await page.evaluate(() => document.documentElement.scrollWidth
        - document.documentElement.clientWidth);
      if (look === 'phone' && wide > 1) troubles.push(`${name} is ${wide} pixels wider than a phone`);
    }
  }
  return findings;
}

async function axe(where, look) {
  const session = await page.createCDPSession();
  await session.send('Page.setBypassCSP', { enabled: true }).catch(() => {});
  if (!await page.evaluate(() => window.axe)) await page.evaluate(AXE);
  // Only the colours are others in the dark, and they alone are the same on a phone.
  const rule = 'color-contrast';
  const rules = { light: {}, dark: { runOnly: [rule] }, phone: { rules: { [rule]: { enabled: false } } } }[look];
  const { violations } = await page.evaluate((more) => window.axe.run(document, { resultTypes: ['violations'], ...more }),
    rules);
  await session.detach();
  for (const v of violations) {
    console.log(`axe, ${where}: ${v.id}: ${v.help}`);
    for (const n of v.nodes.slice(0, 4)) console.log(`    ${n.html.slice(0,
      160)}\n    ${n.failureSummary.split('\n').slice(1, 3).join(' ')}`);
  }
  return violations.length;
}

// By a pipe, so that it ends with this process, however that ends.
const browser = await puppeteer.launch({ executablePath: process.env.CHROMIUM || '/usr/bin/chromium', pipe: true,
  protocolTimeout: 3 * GENEROUS, args: ['--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--lang=en'] });
let failed = true;
try {
  page = await browser.newPage();
  await page.setViewport({ width: 1440, height: 900 });
  // What moves all the time is drawn all the time.
  await page.emulateMediaFeatures([{ name: 'prefers-reduced-motion', value: 'reduce' }]);
  watch();
  await own?.ready(GENEROUS);
  if (process.env.PAGE_FILES) await filesFrom(process.env.PAGE_FILES);
  await enter();
  const steps = pictures ? [history] : [overview, trigger, output, cancel, runsAgain, wentWrong, figures, narrowJob, counted,
    countsAtOnce, countdowns, gone, anotherDay, pauseIt, skip, longOutput, jobFirst, timeline, nothingLeft, maps, wrongAddresses, drain, eventsSeen, described, longLists,
    hostileOutput, hostileWords, middleWidths, keysOfShown, touched, rowsTaken, heldFacts, printed, readers, otherRole,
    commandLines, streamsTaken, allRuns, brokenTokens, twoVersions, unseen, historyRefused, storeAway, takeover, lostInstance,
    silentInstance];
  const only = process.env.STEPS?.split(',');
  for (const step of steps) if (!only || only.includes(step.name)) await step();
  const findings = only ? 0 : await looks();
  if (!only) saw(`each screen, light, dark and on a phone: ${findings} findings of axe-core`);
  for (const name of own ? NAMES : []) {
    if (/panicked/.test(own.log(name))) troubles.push(`${name} panicked:\n${own.log(name)}`);
  }
  failed = findings > 0 || troubles.length > 0;
} catch (error) {
  console.log(`failed: ${error.message}${error.cause ? ` (${error.cause.message})` : ''}`);
  const shown = await page.evaluate(() => document.body.innerText).catch((e) => e.message);
  console.log(`the page shows: ${shown.slice(0, 500)}`);
  console.log(`requests without an answer: ${lost.slice(-10).join('; ') || 'none'}`);
  if (own) console.log(`the log of the instance:\n${own.log(NAMES[0]).slice(-3000)}`);
} finally {
  for (const t of new Set(troubles)) console.log(`trouble: ${t}`);
  await browser.close();
  await own?.end();
}
console.log(failed ? 'The page falls short.' : 'The page does what it should.');
process.exit(failed ? 1 : 0);

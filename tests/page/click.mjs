// Clicks through the page of a running daemon, as a person does, and says what it saw. See README.md.
import { execSync } from 'node:child_process';
import { mkdirSync, readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import puppeteer from 'puppeteer-core';

const url = (process.argv[2] || 'http://127.0.0.1:7878').replace(/\/$/, '');
const token = process.env.SOLOIST_TOKEN;
const shots = process.env.SHOTS;
const GENEROUS = 30_000;
const AXE = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');
if (shots) mkdirSync(shots, { recursive: true });

let page;
const troubles = [];
const saw = (text) => console.log(`saw: ${text}`);
const pause = (ms) => new Promise((r) => setTimeout(r, ms));

/** Waits until `f` of the document gives something, and gives it. */
async function until(what, f, ...args) {
  const end = Date.now() + GENEROUS;
  for (;;) {
    const got = await page.evaluate(f, ...args).catch(() => null);
    if (got) return got;
    if (Date.now() > end) {
      const text = await page.evaluate(() => document.body.innerText.slice(0, 1500));
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
async function type(selector, value) {
  await page.waitForSelector(selector, { timeout: GENEROUS });
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

function watch() {
  page.on('pageerror', (e) => troubles.push(`an error on the page: ${e.message}`));
  page.on('request', (r) => {
    const to = new URL(r.url());
    if (to.protocol.startsWith('http')
      && to.origin !== new URL(url).origin) troubles.push(`a request to another host: ${r.url()}`);
  });
  page.on('console', (m) => {
    if (/Content Security Policy|Refused to/.test(m.text())) troubles.push(`the policy was broken: ${m.text()}`);
  });
}

async function enter() {
  await page.goto(url, { waitUntil: 'domcontentloaded' });
  const first = await until('the first screen', () => document.querySelector('.enter .in, .board')?.className);
  if (first !== 'in') return saw('no token is needed');
  if (!token) throw new Error('this daemon wants a token: set SOLOIST_TOKEN');
  await type('.enter input', 'not-a-token');
  await page.keyboard.press('Enter');
  saw(`a wrong token: “${await until('a refusal', () =>
    document.querySelector('.enter [role=alert]')?.textContent.trim())}”`);
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
  await page.keyboard.press('Enter');
  await until('the run', () => document.querySelector('tr[data-job=talks] .ic[aria-label=running]'));
  saw('talks runs');
  await closed();
}

async function output() {
  await page.$eval('tr[data-job=talks] th a', (a) => a.click());
  await until('the job', () => document.querySelector('h1')?.textContent === 'talks');
  await until('the running attempt', () => document.querySelector('.notes a'));
  await page.click('.notes a');
  const lines = () => (document.querySelector('.outw pre')?.textContent.match(/line \d+/g) || []).length;
  const some = await until('output', lines);
  await until('more output', (n) => (document.querySelector('.outw pre')?.textContent.match(/line \d+/g)
    || []).length > n + 3, some);
  saw(`the output as it comes: ${some}, then ${await page.evaluate(lines)} lines`);
  saw(`why: ${(await until('a decision', () => document.querySelector('.why tr.won')?.textContent)).trim()}`);
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
  await go('#/job/quick');
  await until('the job', () => document.querySelector('h1')?.textContent === 'quick');
  await page.keyboard.press('r');
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
  }
}

async function drain() {
  await go('#/instances');
  await until('instances', () => document.querySelector('.inst tbody tr'));
  await click('Drain', '.inst tbody');
  await click('Drain it', 'dialog[open]');
  await until('the drain', () => /draining/.test(document.querySelector('.inst tbody')?.textContent));
  saw('an instance drains');
  await closed();
  await click('Undrain', '.inst tbody');
  await click('Undrain it', 'dialog[open]');
  await until('the end of it', () => !/draining/.test(document.querySelector('.inst tbody')?.textContent));
  saw('it claims again');
  await closed();
}

async function eventsSeen() {
  // Only rows that are seen are drawn, so each is filtered for.
  const acts = ['triggered', 'paused', 'resumed', 'drains', 'claims again'].map((kind) => ['#/events?f=acts', kind]);
  for (const [hash, kind] of [...acts, ['#/events?q=talks%20cancelled', 'cancelled']]) {
    await go(hash);
    await until(`the event ${kind}`, (k) => document.querySelector('.ev')?.textContent.includes(k), kind);
  }
  saw('each act as an event');
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
  const { SOLOIST_DOWN: down, SOLOIST_UP: up } = process.env;
  if (!down || !up) return;
  await go('#/overview');
  execSync(down, { stdio: 'inherit' });
  saw(`the store away: “${await until('the alert', () =>
    document.querySelector('.banner')?.textContent.trim())}”, “${await text('.verdict')}”`);
  execSync(up, { stdio: 'inherit' });
  await until('the alert to go', () => !document.querySelector('.banner'));
  saw('the store is back, without loading the page again');
}

async function takeover() {
  if (process.env.SOLOIST_KILL !== '1') return;
  const { instance: mine } = await api('session');
  for (let i = 0; i < 12; i++) {
    await go('#/job/survives');
    await until('the job', () => document.querySelector('h1')?.textContent === 'survives');
    await click('Trigger', '.hd');
    await click('Trigger', 'dialog[open] .foot');
    await until('the run', () => document.querySelector('.notes a'));
    await closed();
    const { running: [run] } = await api('jobs/survives');
    const { instances } = await api('instances');
    const holder = instances.find((x) => x.instance === run.instance);
    if (holder.instance !== mine) {
      process.kill(holder.pid, 'SIGKILL');
      saw(`${holder.instance} is killed while it runs survives`);
      await page.click('.notes a');
      saw(`the takeover: ${await until('the takeover', () => [...document.querySelectorAll('.try li')].find((l) =>
        /takeover/.test(l.textContent))?.textContent)}`);
      return;
    }
    await click('Cancel', '.hd');
    await click('Cancel what runs', 'dialog[open]');
    await until('its end', () => !document.querySelector('.notes'));
    await closed();
  }
  throw new Error('the instance that serves the page ran it each time');
}

const LOOKS = [['light', { width: 1440, height: 900 }], ['dark', { width: 1440, height: 900 }],
  ['phone', { width: 390, height: 844, deviceScaleFactor: 2, isMobile: true, hasTouch: true }]];

/** Each screen in each look, with axe-core. Gives the number of findings. */
async function looks() {
  const { runs } = await api('jobs/fails/runs?limit=50');
  const bad = runs?.find((r) => r.outcome === 'failed');
  const screens = [['overview', '#/overview'], ['timeline', '#/timeline?z=1h'], ['timeline-instances',
    '#/timeline?z=1h&by=instances'], ['load', '#/load'], ['calendar', '#/calendar'],
    ['instances', '#/instances'], ['events', '#/events'], ['job', '#/job/fails'], ['occurrence', `#/job/fails?o=${bad
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
        'quick')));
      await pause(900);
      if (shots) await page.screenshot({ path: `${shots}/${name}-${look}.png` });
      findings += await axe(`${name}, ${look}`);
      if (!hash) await page.evaluate(() => document.querySelector('dialog[open]')?.close());
      const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      if (look === 'phone' && wide > 1) troubles.push(`${name} is ${wide} pixels wider than a phone`);
    }
  }
  return findings;
}

async function axe(where) {
  const session = await page.createCDPSession();
  await session.send('Page.setBypassCSP', { enabled: true }).catch(() => {});
  await page.evaluate(AXE);
  const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ['violations'] }));
  await session.detach();
  for (const v of violations) {
    console.log(`axe, ${where}: ${v.id}: ${v.help}`);
    for (const n of v.nodes.slice(0, 4)) console.log(`    ${n.html.slice(0,
      160)}\n    ${n.failureSummary.split('\n').slice(1, 3).join(' ')}`);
  }
  return violations.length;
}

const browser = await puppeteer.launch({ executablePath: process.env.CHROMIUM || '/usr/bin/chromium',
  args: ['--no-sandbox', '--disable-gpu', '--lang=en'] });
let failed = true;
try {
  page = await browser.newPage();
  await page.setViewport({ width: 1440, height: 900 });
  watch();
  await enter();
  for (const step of [overview, trigger, output, cancel, pauseIt, skip, drain, eventsSeen, hostileOutput, storeAway,
    takeover]) await step();
  const findings = await looks();
  saw(`${findings} findings of axe-core`);
  for (const t of new Set(troubles)) console.log(`trouble: ${t}`);
  failed = findings > 0 || troubles.length > 0;
} catch (error) {
  console.log(`failed: ${error.message}`);
} finally {
  await browser.close();
}
console.log(failed ? 'The page falls short.' : 'The page does what it should.');
process.exit(failed ? 1 : 0);

// How quick the page is with many jobs: reported, not judged. sh tests/page/run.sh speed [JOBS]
import { spawn } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import puppeteer from 'puppeteer-core';
import { freePorts } from './stage.mjs';

const JOBS = Number(process.argv[3] || 1000);
const TIMES = 7;
const [port] = await freePorts(1);
const url = `http://127.0.0.1:${port}`;
const dir = mkdtempSync(join(tmpdir(), 'soloist-speed-'));
const config = (schedule) => {
  let text = `[store]\nurl = "sqlite:soloist.db"\n[http]\nlisten = "127.0.0.1:${port}"\n`;
  for (let i = 0; i < JOBS; i++) {
    text += `[jobs.job-${String(i).padStart(4, '0')}]\ndescription = "The job of number ${i}, which does one thing"\n`
      + `tags = ["team-${i % 12}"]\nschedule = "${schedule(i)}"\ncommand = ["true"]\n`;
  }
  writeFileSync(join(dir, 'jobs.toml'), text);
};
// Each minute until there is some history, and then each hour: what is measured is the page, not the starts.
config((i) => `${i % 60} * * * * *`);
const child = spawn(process.env.SOLOIST, ['--config', 'jobs.toml', 'run'], { cwd: dir, stdio: 'ignore' });
for (const s of ['SIGTERM', 'SIGINT', 'SIGHUP']) process.on(s, () => process.exit(1));
process.on('exit', () => {
  child.kill('SIGKILL');
  rmSync(dir, { recursive: true, force: true });
});
const pause = (ms) => new Promise((r) => setTimeout(r, ms));
for (;;) {
  const jobs = await fetch(`${url}/api/v1/jobs`).then((a) => a.json()).catch(() => null);
  if (jobs?.jobs.filter((j) => j.recent.length > 2).length > JOBS / 2) break;
  await pause(1000);
}
config((i) => `${i % 60} * * * *`);
child.kill('SIGHUP');
await pause(3000);

const sorted = (list) => [...list].sort((a, b) => a - b);
const say = (what, list, unit = 'ms') => {
  const s = sorted(list);
  console.log(`${what.padEnd(44)} ${s.length > 1 ? `median ${Math.round(s[s.length >> 1])}, least ${Math.round(s[0])}, most `
    : ''}${Math.round(s[s.length - 1])} ${unit}`);
};

const answers = [];
for (let i = 0; i < 200; i++) {
  const from = performance.now();
  await fetch(`${url}/api/v1/jobs`).then((a) => a.arrayBuffer());
  answers.push(performance.now() - from);
}
say(`GET /api/v1/jobs of ${JOBS} jobs, 99 of 100`, [sorted(answers)[197]]);

const browser = await puppeteer.launch({ executablePath: process.env.CHROMIUM || '/usr/bin/chromium', pipe: true,
  args: ['--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--lang=en'] });
const page = await browser.newPage();
await page.setViewport({ width: 1440, height: 900 });
// A mark when the first rows are there, and one when the next frame has shown them.
await page.evaluateOnNewDocument(() => {
  new MutationObserver((_, o) => {
    if (!document.querySelector('.board tr.row')) return;
    o.disconnect();
    performance.mark('rows');
    requestAnimationFrame(() => setTimeout(() => performance.mark('shown')));
  }).observe(document, { childList: true, subtree: true });
});
const at = { 'first contentful paint': [], 'the script runs': [], 'all lists are here': [], rows: [], shown: [] };
for (const kind of ['nothing in the cache', 'with the cache']) {
  for (const list of Object.values(at)) list.length = 0;
  for (let i = 0; i < TIMES; i++) {
    await page.setCacheEnabled(kind === 'with the cache');
    await page.goto(url, { waitUntil: 'domcontentloaded' });
    await page.waitForFunction(() => performance.getEntriesByName('shown').length, { timeout: 60_000 });
    const seen = await page.evaluate(() => {
      const named = (n) => performance.getEntriesByName(n)[0]?.startTime;
      const loads = performance.getEntriesByType('resource');
      const api = loads.filter((r) => /\/api\//.test(r.name) && !/events/.test(r.name));
      return { 'first contentful paint': named('first-contentful-paint'), 'the script runs': Math.min(...api.map((r) =>
        r.startTime)), 'all lists are here': Math.max(...api.map((r) => r.responseEnd)), rows: named('rows'),
      shown: named('shown') };
    });
    for (const [k, v] of Object.entries(seen)) if (v != null) at[k].push(v);
  }
  for (const [k, list] of Object.entries(at)) if (list.length) say(`page, ${kind}: ${k}`, list);
}

/** Frames while `f` goes on. */
async function frames(what, f) {
  const list = await page.evaluate(async (source) => {
    const found = [];
    let [last, on] = [performance.now(), true];
    const tick = (t) => {
      found.push(t - last);
      last = t;
      if (on) requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
    await (0, eval)(`(${source})`)();
    on = false;
    return found.slice(1);
  }, f.toString());
  const s = sorted(list);
  console.log(`${what.padEnd(44)} ${s.length} frames: median ${s[s.length >> 1].toFixed(1)}, 99 of 100 ${s[
    Math.floor(s.length * 0.99)].toFixed(1)}, most ${s[s.length - 1].toFixed(1)} ms`);
}
await page.setBypassCSP(true);
await page.reload();
await page.waitForFunction(() => document.querySelector('.board tr.row'));
await frames('scroll', async () => {
  for (let i = 0; i < 150; i++) {
    scrollBy(0, 180);
    await new Promise(requestAnimationFrame);
  }
  scrollTo(0, 0);
});
await frames('filter', async () => {
  const input = document.querySelector('#filter');
  for (const text of ['j', 'jo', 'job-1', 'job-12', '', 't', 'team-3', '']) {
    input.value = text;
    input.dispatchEvent(new Event('input', { bubbles: true }));
    await new Promise((r) => setTimeout(r, 120));
  }
});
say('heap of the page', [(await page.metrics()).JSHeapUsedSize / 1e6], 'MB');
await browser.close();
process.exit();

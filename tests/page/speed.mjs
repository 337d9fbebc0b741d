// How quick the page is at this address: measured, not judged. sh tests/page/run.sh speed URL
// `cargo bench -- page` starts it before a fleet in which the job `each-second` begins to run each second, and makes its
// rows of the JSON that it prints. All figures are in milliseconds.
import puppeteer from 'puppeteer-core';

const [url] = process.argv.slice(3);
const TIMES = 9;
const STARTS = 20;

const browser = await puppeteer.launch({ executablePath: process.env.CHROMIUM || '/usr/bin/chromium', pipe: true,
  args: ['--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--lang=en'] });
let page = await browser.newPage();
await page.setViewport({ width: 1440, height: 900 });
// A mark when the first rows are there, and one when the next frame has shown them.
await page.evaluateOnNewDocument(() => {
  new MutationObserver((_, o) => {
    if (!document.querySelector('.board tr.row')) return;
    o.disconnect();
    requestAnimationFrame(() => setTimeout(() => performance.mark('shown')));
  }).observe(document, { childList: true, subtree: true });
});

/** From the request of the page until its rows are on the screen. */
async function opened(cached) {
  const all = [];
  await page.setCacheEnabled(cached);
  for (let i = 0; i < TIMES; i++) {
    await page.goto(url, { waitUntil: 'domcontentloaded' });
    await page.waitForFunction(() => performance.getEntriesByName('shown').length, { timeout: 60_000 });
    all.push(await page.evaluate(() => performance.getEntriesByName('shown')[0].startTime));
  }
  return all;
}

/** How long each frame takes while `f` goes on, which says false if there were no more. */
async function frames(f) {
  return page.evaluate(async (source) => {
    const found = [];
    let [last, on] = [performance.now(), true];
    const tick = (t) => {
      found.push(t - last);
      last = t;
      if (on) requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
    const whole = await (0, eval)(`(${source})`)();
    on = false;
    return whole === false ? null : found.slice(1);
  }, f.toString());
}

const found = { first: await opened(false), again: await opened(true), scroll: [], floor: [] };

/** Scrolls what is open. None: the browser gave no more frames, as it does now and then without a window. */
const scroll = () => frames(async () => {
  for (let i = 0; i < 150; i++) {
    scrollBy(0, 180);
    const frame = new Promise(requestAnimationFrame);
    if (await Promise.race([frame, new Promise((r) => setTimeout(r, 5000, 'none'))]) === 'none') return false;
  }
  scrollTo(0, 0);
  return true;
});

/** Opens the page anew and scrolls it. */
async function scrolled() {
  await page.setBypassCSP(true);
  await page.goto(url);
  await page.reload();
  // The runs come after the rows, and take a while to be drawn: that is not what is measured here.
  await page.waitForFunction(() => /^Last 24:/.test(document.querySelector('tr.row[data-job^=idle] svg.st')?.ariaLabel));
  await new Promise((r) => setTimeout(r, 1000));
  return scroll();
}

/** What this browser can do on this host now: scrolls a thousand rows of plain text that nothing changes. */
async function plain() {
  const row = (i) => `<tr>${`<td>idle-${i}</td>`.repeat(8)}</tr>`;
  const rows = Array.from({ length: 1000 }, (_, i) => row(i)).join('');
  const style = 'table { table-layout: fixed; width: 100%; border-collapse: collapse } td { height: 32px; padding: 0 }';
  await page.goto('about:blank');
  await page.setContent(`<!doctype html><style>${style}</style><table>${rows}</table>`);
  await new Promise((r) => setTimeout(r, 1000));
  return scroll();
}

const turn = [[found.floor, plain], [found.scroll, scrolled]];
for (const [all, how] of [...turn, ...turn]) {
  let some = await how();
  for (let again = 0; !some && again < 3; again++) {
    console.error('the browser gave no more frames while it scrolled: once more, in another page');
    await page.close();
    page = await browser.newPage();
    await page.setViewport({ width: 1440, height: 900 });
    some = await how();
  }
  if (!some) throw new Error('the browser gave no frames in four pages');
  all.push(...some);
}
found.filter = await frames(async () => {
  const input = document.querySelector('#filter');
  for (const text of ['i', 'id', 'idle-00', 'idle-009', '', 'e', 'idle-003', '']) {
    input.value = text;
    input.dispatchEvent(new Event('input', { bubbles: true }));
    await new Promise((r) => setTimeout(r, 120));
  }
});
// However many frames it took: each row is one of the filtered list.
await page.evaluate(() => {
  const input = document.querySelector('#filter');
  input.value = 'idle-0';
  input.dispatchEvent(new Event('input', { bubbles: true }));
});
await page.waitForFunction(() => {
  const rows = [...document.querySelectorAll('tr.row')];
  return rows.length > 16 && rows.every(({ dataset, children }) => /^idle-0/.test(dataset.job)
    && children[1].querySelector('a').textContent === dataset.job);
}, { timeout: 5000 });
found.heap = (await page.metrics()).JSHeapUsedSize;

// When the page says that the job runs, by the clock that the job's command reads, too.
await page.goto(`${url}/#/overview?q=each-second`);
await page.reload();
await page.waitForFunction(() => document.querySelector('tr.row[data-job="each-second"]'));
found.seen = await page.evaluate((starts) => new Promise((done) => {
  const seen = [];
  let ran = true;
  new MutationObserver((_, o) => {
    const runs = document.querySelector('tr.row[data-job="each-second"] .c-t')?.textContent.includes('…') ?? ran;
    if (runs && !ran) seen.push(performance.timeOrigin + performance.now());
    ran = runs;
    if (seen.length < starts) return;
    o.disconnect();
    done(seen);
  }).observe(document, { childList: true, subtree: true, characterData: true });
}), STARTS);
await browser.close();
console.log(JSON.stringify(found));

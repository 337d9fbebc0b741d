// A fleet for click.mjs: a Redis server, three instances, and a balancer before two of them. All is below a temporary
// folder, on free ports, and ends with this process.
import { execFileSync, spawn } from 'node:child_process';
import { closeSync, mkdirSync, mkdtempSync, openSync, readFileSync, readdirSync, rmSync, rmdirSync, writeFileSync } from
  'node:fs';
import http from 'node:http';
import net from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

const pause = (ms) => new Promise((r) => setTimeout(r, ms));

/** So many ports that are free now. */
export async function freePorts(n) {
  const servers = await Promise.all(Array.from({ length: n }, () => new Promise((r) => {
    const s = net.createServer().listen(0, '127.0.0.1', () => r(s));
  })));
  const ports = servers.map((s) => s.address().port);
  await Promise.all(servers.map((s) => new Promise((r) => { s.close(r); })));
  return ports;
}

/** A cgroup for the fleet, if one can be made: daemons end what others that were killed left in their own. */
function ownCgroup() {
  try {
    const mount = /^(?:\S+ ){4}(\S+) .* - cgroup2 /m.exec(readFileSync('/proc/self/mountinfo', 'utf8'))[1];
    const dir = join(mount, /^0::(.*)/m.exec(readFileSync('/proc/self/cgroup', 'utf8'))[1], `page-${process.pid}`);
    mkdirSync(dir);
    return dir;
  } catch {
    return null;
  }
}
function endCgroup(dir) {
  writeFileSync(join(dir, 'cgroup.kill'), '1');
  for (let tries = 0; tries < 100; tries += 1) {
    try {
      for (const e of readdirSync(dir, { withFileTypes: true })) if (e.isDirectory()) rmdirSync(join(dir, e.name));
      return rmdirSync(dir);
    } catch {
      // Something in it is still dying.
      Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 20);
    }
  }
  return undefined;
}

/** Starts all of it with this build of soloist, and the jobs of this file. */
export async function stage(soloist, file = 'jobs.toml', names = ['a', 'b', 'c']) {
  const jobs = readFileSync(new URL(file, import.meta.url), 'utf8');
  const dir = mkdtempSync(join(tmpdir(), 'soloist-page-'));
  const [redisPort, ...ports] = await freePorts(5);
  const children = new Map();
  const cgroup = ownCgroup();
  const run = (name, program, args, env = {}) => {
    const log = openSync(join(dir, `${name}.log`), 'a');
    const child = spawn(program, args, { cwd: dir, env: { ...process.env, ...env }, stdio: ['ignore', log, log] });
    closeSync(log);
    const gone = new Promise((r) => {
      child.on('exit', r);
      child.on('error', r);
    });
    children.set(name, { child, gone });
  };
  for (const s of ['SIGTERM', 'SIGINT', 'SIGHUP']) process.on(s, () => process.exit(1));
  process.on('exit', () => {
    for (const { child } of children.values()) child.kill('SIGKILL');
    if (cgroup) endCgroup(cgroup);
    rmSync(dir, { recursive: true, force: true });
  });

  const tokens = {};
  let lines = '';
  for (const role of ['operate', 'read']) {
    const made = execFileSync(soloist, ['http', 'token', `the-${role}`, role], { encoding: 'utf8', stdio: ['ignore',
      'pipe', 'ignore'] });
    const [token, line] = made.trim().split('\n');
    tokens[role] = token;
    lines += `${line}\n`;
  }
  writeFileSync(join(dir, 'tokens'), lines);
  names.forEach((name, i) => {
    const text = jobs.replace('sqlite:soloist.db', `redis://127.0.0.1:${redisPort}`)
      .replace('127.0.0.1:7878', `127.0.0.1:${ports[i]}`)
      // A short lease: a new store grants nothing for one. Nobody waits for what runs at the end.
      .replace('[http]\n', '[defaults]\nlease = "3s"\n\n[limits]\ndrain = "0s"\n\n[http]\n')
      // The third only lets itself be read.
      .replace('[http]\n', `[http]\n${i === 2 ? 'read_only = true\n' : ''}`);
    writeFileSync(join(dir, `${name}.toml`), text);
  });
  const start = (name) => run(name, 'sh', ['-c', '[ -z "$0" ] || echo 0 >"$0/cgroup.procs"; exec "$@"', cgroup ?? '', soloist,
    '--config', `${name}.toml`, 'run'], { SOLOIST_INSTANCE: name });
  run('redis', 'redis-server', ['--port', String(redisPort), '--bind', '127.0.0.1', '--save', '', '--maxmemory-policy',
    'noeviction']);
  for (const name of names) start(name);
  const url = Object.fromEntries(names.map((name, i) => [name, `http://127.0.0.1:${ports[i]}`]));

  // Each connection of a browser lives long, so the balancer takes turns by request. The second instance says that it
  // is of another version.
  let turn = 0;
  const served = [0, 0];
  const front = http.createServer((q, r) => {
    const i = turn++ % 2;
    served[i] += 1;
    const other = i === 1 && q.url === '/api/v1/session';
    const headers = { ...q.headers, host: `127.0.0.1:${ports[i]}` };
    // As one that is told of its public_url would take it.
    delete headers.origin;
    const o = http.request({ host: '127.0.0.1', port: ports[i], path: q.url, method: q.method, headers }, (a) => {
      if (!other) {
        r.writeHead(a.statusCode, a.headers);
        a.pipe(r);
        return;
      }
      let text = '';
      a.setEncoding('utf8').on('data', (d) => { text += d; }).on('end', () => {
        const { 'content-length': _, ...rest } = a.headers;
        r.writeHead(a.statusCode, rest);
        r.end(text.replace(/"version":"[^"]*"/, '"version":"99.0.0"'));
      });
    });
    o.on('error', () => r.destroy());
    r.on('close', () => o.destroy());
    q.pipe(o);
  }).listen(ports[3], '127.0.0.1');

  const signal = (name, s) => children.get(name).child.kill(s);
  return {
    url,
    tokens,
    tokensFile: join(dir, 'tokens'),
    front: { url: `http://127.0.0.1:${ports[3]}`, served, breakAll: () => front.closeAllConnections() },
    log: (name) => readFileSync(join(dir, `${name}.log`), 'utf8'),
    /** SIGKILL; ends when it is dead. */
    async kill(name) {
      signal(name, 'SIGKILL');
      await children.get(name).gone;
    },
    start,
    stop: (name) => signal(name, 'SIGSTOP'),
    goOn: (name) => signal(name, 'SIGCONT'),
    storeAway: () => signal('redis', 'SIGSTOP'),
    storeBack: () => signal('redis', 'SIGCONT'),
    soloist: (...words) => execFileSync(soloist, ['--config', `${names[1]}.toml`, ...words], { cwd: dir, encoding: 'utf8',
      stdio: ['ignore', 'pipe', 'pipe'], timeout: 60_000 }),
    /** Ends the instances in order: one that is killed may leave a process that tries for a day to reach the store. */
    async end() {
      for (const { child } of children.values()) child.kill('SIGCONT');
      await Promise.all(names.map(async (name) => {
        const { child, gone } = children.get(name);
        child.kill('SIGTERM');
        await Promise.race([gone, pause(15_000)]);
      }));
    },
    /** Ends when an instance knows all jobs and the store grants. */
    async ready(limit) {
      for (const end = Date.now() + limit; ; await pause(50)) {
        const headers = { Authorization: `Bearer ${tokens.read}` };
        const all = await Promise.all(names.map(async (name) => {
          const answer = await fetch(`${url[name]}/api/v1/jobs`, { headers }).then((a) => a.json()).catch(() => null);
          return answer?.epoch?.open && answer.jobs.every((j) => j.known && !j.quarantined);
        }));
        if (all.every(Boolean)) return;
        const dead = names.find((name) => children.get(name).child.exitCode != null);
        if (dead || Date.now() > end) throw new Error(`the fleet does not start:\n${this.log(dead ?? names[0])}`);
      }
    },
  };
}

-- claim.lua: decides up to 100 claims, each for one occurrence of one job. The reference is `claim` in
-- src/logic/claim.rs; a test compares the two on random sequences.
--
-- KEYS     two for each claim: state   <ns>:{<job>}:state    hash, see lib.lua
--                              history <ns>:{<job>}:history  list of JSON run records, newest first, expires
-- ARGV[1]  instance   ARGV[2] host   ARGV[3] channel for events
-- then nine for each claim:
--   job, occurrence (ms; empty for a manual trigger), known (ms), run, start_by (ms), overlap, trigger,
--   entry (JSON members of the open entry that the claimant fills in),
--   and extra: empty, or JSON {missed, observed, holds, on_crash, max_attempts, key, before, cause}
--
-- Publishes the jobs that it decided something about on the channel `<channel>:changes`: JSON, a list of names.
--
-- Returns  {now_us, incarnation, answer...}; an answer is 1 (granted as claimed: attempt 1), or the JSON of the open
-- entry that has the occurrence (running), or an array that begins with its name:
--   granted occurrence attempt trigger | running entry | blocked entry | settled last | early wait_us | later wait_ms
--   run_first occurrence | recorded outcome reason | behind newest early | quarantined | absent | in_doubt

local instance, host, channel = ARGV[1], ARGV[2], ARGV[3]

local function holds(extra, run)
  for _, r in ipairs(extra.holds or {}) do if r == run then return true end end
  return false
end

local function publish(event) redis.call('PUBLISH', channel, cjson.encode(event)) end

local function observed(e, extra)
  local o = extra.observed
  return o and o.run == e.run and o.seq == e.seq and o.incarnation == e.incarnation
end

-- The members that the open entries of all grants of this call have in common.
local GRANTED = ',"seq":0,"incarnation":"' .. incarnation .. '","granted_at":' .. int(now)
  .. ',"renewed_at":' .. int(now) .. '}'
local NOTHING = {}

-- Returns the list of open entries `before` (JSON, or false) with the entry of a grant at its end. The claimant wrote
-- most of that entry. One concatenation, because making strings takes most of the time of a claim.
local function append(before, c, at, attempt, trigger, key, by)
  local start = before and string.sub(before, 1, -2) .. ',' or '['
  key = key and '","key":' .. cjson.encode(key) .. ',' or '",'
  if by then key = key .. '"by":' .. cjson.encode(by) .. ',' end
  return start .. '{"occurrence":' .. at .. ',"attempt":' .. attempt .. ',"trigger":"' .. trigger .. key .. c.entry
    .. GRANTED .. ']'
end

local function remember_trigger(c, key, at, triggers)
  local left = {}
  for _, p in ipairs(triggers) do
    if p.key ~= key then left[#left + 1] = p else c.by = p.by end
  end
  save_list(c.state, 'triggers', left)
  remember_key(c.state, key, at)
end

-- Returns how many milliseconds of the pause (JSON, or false) are left; nil: there is none.
local function paused(pause)
  if not pause then return end
  pause = cjson.decode(pause)
  if not pause['until'] then return PAUSED_WAIT end
  if now < pause['until'] then return pause['until'] - now end
end

local function not_run(c, at, outcome, count, reason)
  push_history(c.history, cjson.encode({ job = c.job, occurrence = at, trigger = c.trigger, attempt = 0,
    instance = instance, host = host, outcome = outcome, count = count, error = reason,
    by = c.by or c.asked[reason] }))
end

-- As `not_run`, of occurrences that a loss of the store's data, or a pause, kept from running. If the history has such
-- a record of `before`, the newest one that was decided before them, the new record takes its place. -1: one that ran
-- early lies between them.
local function keep_back(c, at, count, before, outcome, why)
  local all = redis.call('LRANGE', c.history, 0, HISTORY_KEPT)
  for i, text in ipairs(all) do
    local old = string.find(text, '"occurrence":' .. int(before), 1, true) and cjson.decode(text)
    if old and old.occurrence == before and old.attempt == 0 and old.error == why then
      redis.call('LTRIM', c.history, i, -1)
      for j = i - 1, 1, -1 do redis.call('LPUSH', c.history, all[j]) end
      count = count + old.count
      break
    end
  end
  not_run(c, at, outcome, count, why)
  return { 'recorded', outcome, why }
end

local function reason_of_lapse(e) return e.seq > 0 and LAPSED or NEVER_RENEWED end

-- Records that the lease of `open[i]` lapsed. Returns true if another attempt follows. Changes `open`; the caller saves
-- it.
local function lapse(c, open, i, extra)
  local e = open[i]
  -- What is granted waits for its turn to start: without a renewal it may not have had it.
  local began = e.seq > 0 and e.granted_at or nil
  push_history(c.history, cjson.encode({ run_id = e.run, job = c.job, occurrence = e.occurrence,
    trigger = e.trigger, attempt = e.attempt, instance = e.instance, host = e.host, started_at = began,
    finished_at = now, lateness_ms = began and began - e.occurrence, duration_ms = began and math.max(0, now - began),
    outcome = 'unknown', error = reason_of_lapse(e), count = 1, by = e.by }))
  -- Nobody saw this run end: it counts as active until its last renewal, not until the store found it dead.
  save_last(c.state, e, 'unknown', began, e.renewed_at, now)
  if extra.on_crash == 'rerun' and e.attempt < extra.max_attempts and not e.stop then
    e.next_attempt = { at = now, trigger = 'takeover' }
    return true
  end
  redis.call('HSET', c.state, 'lapsed', cjson.encode(table.remove(open, i)))
  return false
end

local function claim_open(c, open, i, extra, pause)
  local e = open[i]
  if not e.next_attempt then
    if e.run == c.run then
      -- The claimant repeats its claim after a lost reply: it counts its trust from this request.
      e.seq, e.renewed_at = math.min(e.seq + 1, SEQ_MOST), now
      save_list(c.state, 'open', open)
      return { 'granted', int(e.occurrence), e.attempt, e.trigger }
    end
    if not observed(e, extra) then return { 'running', cjson.encode(e) } end
    local another, reason = lapse(c, open, i, extra), reason_of_lapse(e)
    save_list(c.state, 'open', open)
    if not another then return { 'recorded', 'unknown', reason } end
  end
  if e.run == c.run then return { 'settled', '' } end
  -- A takeover is due at once. Its time was taken from a clock that may have been wrong.
  local left = e.next_attempt.trigger == 'takeover' and 0 or e.next_attempt.at - now
  if left > 0 then return { 'later', int(left) } end
  pause = paused(pause)
  if pause then return { 'later', int(pause) } end
  local attempt, trigger = e.attempt + 1, e.next_attempt.trigger
  -- Another run can be active here only if the policy was `allow` before.
  if c.overlap ~= 'allow' then
    local j = 1
    while open[j] do
      local other = open[j]
      if not other.next_attempt and not observed(other, extra) then
        redis.call('HSET', c.state, 'waiting', 1)
        save_list(c.state, 'open', open)
        return { 'blocked', cjson.encode(other) }
      end
      if not other.next_attempt and not lapse(c, open, j, extra) then
        if j < i then i = i - 1 end
      else
        j = j + 1
      end
    end
  end
  local all = {}
  for j, other in ipairs(open) do
    if j == i then
      all[j] = string.sub(append(false, c, int(e.occurrence), int(attempt), trigger, e.key, e.by), 2, -2)
    else
      all[j] = cjson.encode(other)
    end
  end
  redis.call('HSET', c.state, 'open', '[' .. table.concat(all, ',') .. ']')
  return { 'granted', int(e.occurrence), attempt, trigger }
end

-- True: a part of the range `m` is decided, but not all of it.
local function decided_in(m, newest, early)
  if m.last <= newest then return false end
  for _, e in ipairs(early) do if m.first <= e and e <= m.last then return true end end
  return m.first <= newest
end

-- As `decide`, but undecided occurrences before `at` stay undecided.
local function not_started(c, extra, at, triggers, outcome, reason)
  if triggers then remember_trigger(c, extra.key, at, triggers) end
  not_run(c, at, outcome, 1, reason)
  return { 'recorded', outcome, reason }
end

-- Decides `at` without a run.
local function decide(c, extra, at, triggers, outcome, reason)
  if at > tonumber(redis.call('HGET', c.state, 'newest') or '0') then
    redis.call('HSET', c.state, 'newest', int(at))
  end
  return not_started(c, extra, at, triggers, outcome, reason)
end

-- Returns `before`, or -1 if an occurrence between it and `first` ran early.
local function next_to(before, first, early)
  for _, e in ipairs(early) do if before < e and e < first then return -1 end end
  return before
end

local function claim(c)
  local st = redis.call('HMGET', c.state, 'incarnation', 'newest', 'open', 'last_to', 'pause', 'skip', 'early', 'off',
    'lost_before', 'lost_until')
  if not st[1] then return { 'absent' } end
  local newest, open_json = tonumber(st[2] or '0'), st[3]
  -- If `known` is further in the future than a server's clock may be behind, ignore it: the claimant learned it from a
  -- clock that was wrong.
  if c.known > newest and c.known <= now + NEAR then
    newest = c.known
    redis.call('HSET', c.state, 'newest', int(newest))
  end
  if st[1] ~= incarnation then return { 'quarantined' } end
  -- Newer ones are decided; or the clock that dated it was wrong, and has been corrected.
  local lost_before = tonumber(st[9] or '0')
  if lost_before > 0 and (lost_before <= newest or lost_before > now) then
    lost_before = 0
    redis.call('HDEL', c.state, 'lost_before')
  end
  local lost_until = tonumber(st[10] or '0')
  if lost_until > 0 and (lost_until <= newest or lost_until > now) then
    lost_until = 0
    redis.call('HDEL', c.state, 'lost_until', 'lost_why', 'first_wait')
  end

  local extra = c.extra == '' and NOTHING or cjson.decode(c.extra)
  local at, manual, open = c.at, c.at == nil, NOTHING
  if open_json and (manual or at <= newest or c.overlap ~= 'allow') then
    open = cjson.decode(open_json)
    for i, e in ipairs(open) do
      if at and e.occurrence == at or extra.key and e.key == extra.key then
        return claim_open(c, open, i, extra, st[5])
      end
    end
  end

  local cause = extra.cause and ': ' .. extra.cause or ''
  -- start_by 2: the latest moment for a start has passed, and the clock was in doubt then.
  local late = c.start_by == 2 and IN_DOUBT or TOO_LATE .. cause
  local triggers
  if manual then
    triggers = cjson.decode(redis.call('HGET', c.state, 'triggers') or '[]')
    local pending, done
    for _, p in ipairs(triggers) do
      if p.key == extra.key then
        pending = p
        break
      end
    end
    if not pending then
      local last, triggered = unpack(redis.call('HMGET', c.state, 'last', 'triggered'))
      for _, p in ipairs(last and triggered and cjson.decode(triggered) or NOTHING) do
        if p.key == extra.key then
          done = p.occurrence
          break
        end
      end
      if not (last and done and cjson.decode(last).occurrence == done) then last = '' end
      return { 'settled', last }
    end
    if now > c.start_by then
      -- A record needs no room, only an instant at which no occurrence can be planned.
      at = math.min(pending.at, now)
      return not_started(c, extra, at % 1000 == 0 and at + 1 or at, triggers, 'missed', late)
    end
    at = now
    -- If the instant `before` has passed and is not decided, leave room for more than one trigger before it.
    if extra.before and extra.before <= now then at = math.max(newest + 1, extra.before - 999) end
    if at <= newest or extra.before and at >= extra.before then
      -- If the clock is behind the newest decided occurrence, there is room once the clock has passed that.
      return { 'early', at <= newest and int((newest + 1) * 1000 - now_us) or '1000' }
    end
  else
    if at <= newest then
      local last = redis.call('HGET', c.state, 'last')
      if not (last and cjson.decode(last).occurrence == at) then last = '' end
      return { 'settled', last }
    end
    if now_us < at * 1000 then return { 'early', int(at * 1000 - now_us) } end
    -- The claim shows that an instance has the job and that it is enabled.
    if st[8] and c.start_by ~= -1 then redis.call('HDEL', c.state, 'off') end
  end

  -- start_by 0: the occurrence is not to be caught up; -1: its job was removed.
  local never = c.start_by == -1 and JOB_REMOVED or OVERDUE .. cause
  local pause = st[5] and cjson.decode(st[5])
  local paused_why = pause and (pause.reason and 'paused: ' .. pause.reason or 'paused')
  if pause then c.asked[paused_why] = pause.by end
  -- Returns an outcome, and why the occurrences from `first` to `last` do not run; nil: not for a loss or a pause.
  local function why_late(first, last)
    if c.start_by == -1 then return end
    if first <= lost_until and last > lost_before then
      local lost = redis.call('HMGET', c.state, 'first_wait', 'lost_why')
      return lost[1] and 'skipped' or 'missed', lost[2] or AFTER_LOSS
    end
    local covers = pause and pause.at <= first and (not pause['until'] or last < pause['until'])
    if covers then return 'skipped', paused_why end
  end
  local early = st[7] and cjson.decode(st[7]) or NOTHING
  if extra.missed then
    local before, kept, kept_from, kept_as, kept_why = newest, 0, nil, nil, nil
    for _, m in ipairs(extra.missed) do
      if m.last < at and decided_in(m, newest, early) then return { 'behind', int(newest), st[7] or '[]' } end
    end
    for _, m in ipairs(extra.missed) do
      if m.last < at and m.last > newest then
        local outcome, why = why_late(m.first, m.last)
        local from = next_to(newest, m.first, early)
        if kept_from and (why ~= kept_why or from < 0) then
          keep_back(c, newest, kept, kept_from, kept_as, kept_why)
          kept, kept_from = 0, nil
        end
        if why then
          kept, kept_from, kept_as, kept_why = kept + m.count, kept_from or from, outcome, why
        else
          not_run(c, m.last, 'missed', m.count, never)
        end
        newest = m.last
      end
    end
    if kept_from then keep_back(c, newest, kept, kept_from, kept_as, kept_why) end
    if newest > before then redis.call('HSET', c.state, 'newest', int(newest)) end
  end
  if st[7] then
    local ran, left = false, {}
    for _, e in ipairs(early) do ran = ran or not manual and e == at end
    if ran then
      newest = at
      redis.call('HSET', c.state, 'newest', int(at))
    end
    for _, e in ipairs(early) do
      if e > newest then left[#left + 1] = e end
    end
    if #left < #early then save_list(c.state, 'early', left) end
    if ran then
      local last = redis.call('HGET', c.state, 'last')
      if not (last and cjson.decode(last).occurrence == at) then last = '' end
      return { 'settled', last }
    end
  end

  if not manual and at <= lost_before then return decide(c, extra, at, triggers, 'unknown', LOST) end

  if not manual and c.start_by ~= -1 and at <= lost_until and redis.call('HGET', c.state, 'first_wait') then
    redis.call('HSET', c.state, 'newest', int(at))
    return keep_back(c, at, 1, next_to(newest, at, early), why_late(at, at))
  end

  if not manual and pause then
    if paused(st[5]) then
      if now <= c.start_by or c.start_by == -1 then return decide(c, extra, at, triggers, 'skipped', paused_why) end
      redis.call('HSET', c.state, 'newest', int(at))
      return keep_back(c, at, 1, next_to(newest, at, early), 'skipped', paused_why)
    end
    redis.call('HDEL', c.state, 'pause')
  end
  if not manual and st[6] and tonumber(st[6]) > 0 then
    redis.call('HINCRBY', c.state, 'skip', -1)
    c.asked['skipped by request'] = redis.call('HGET', c.state, 'skip_by') or nil
    publish({ controlled = { job = c.job } })
    return decide(c, extra, at, triggers, 'skipped', 'skipped by request')
  end
  if now > c.start_by then
    local outcome, why = why_late(at, at)
    if why and c.start_by ~= 2 then
      redis.call('HSET', c.state, 'newest', int(at))
      return keep_back(c, at, 1, next_to(newest, at, early), outcome, why)
    end
    local reason = c.start_by <= 0 and never or late
    return decide(c, extra, at, triggers, 'missed', reason)
  end

  if c.overlap ~= 'allow' then
    if not manual and c.overlap == 'skip' and st[4] and at < tonumber(st[4]) then
      local last = cjson.decode(redis.call('HGET', c.state, 'last'))
      if last.from <= at then return decide(c, extra, at, triggers, 'skipped', OVERLAPS) end
    end
    local e, changed = open[1], false
    if e and not e.next_attempt and observed(e, extra) then
      lapse(c, open, 1, extra)
      e, changed = open[1], true
    end
    -- There is more than one open entry only if the policy was `allow` before.
    while e do
      local wait
      local pause = e.next_attempt and paused(st[5])
      local first = pause and { 'later', int(pause) } or { 'run_first', int(e.occurrence) }
      if e.next_attempt and e.next_attempt.trigger == 'takeover' then
        wait = first
      elseif e.next_attempt and c.overlap == 'queue' then
        wait = now >= e.next_attempt.at and first or { 'later', int(e.next_attempt.at - now) }
      elseif e.next_attempt then
        -- Drop a waiting retry: its token would be older than that of the newer run.
        table.remove(open, 1)
        e, changed = open[1], true
      else
        -- `alive` is true if something proves that the run was active when this occurrence was due. Without a proof the
        -- run may have been dead by then, or this occurrence is overdue itself.
        local alive = e.granted_at <= at and (e.renewed_at >= at or holds(extra, e.run))
        if not manual and c.overlap == 'skip' and alive then
          if changed then save_list(c.state, 'open', open) end
          return decide(c, extra, at, triggers, 'skipped', OVERLAPS)
        end
        if c.overlap == 'replace' and not e.stop then
          e.stop, changed = 'replaced', true
          publish({ stop = { job = c.job } })
        end
        redis.call('HSET', c.state, 'waiting', 1)
        wait = { 'blocked', cjson.encode(e) }
      end
      if wait then
        if changed then save_list(c.state, 'open', open) end
        return wait
      end
    end
    open_json = false
  end

  if manual then remember_trigger(c, extra.key, at, triggers) end
  local text = c.at_text ~= '' and c.at_text or int(at)
  redis.call('HSET', c.state, 'newest', text, 'open', append(open_json, c, text, '1', c.trigger, extra.key,
    c.by))
  return { 'granted', text, '1', c.trigger }
end

-- Most claims are either the first for their occurrence, and granted, or later, and find it running. `quick` answers
-- these two without decoding anything, with 1 or with the JSON of the open entry; nil: the claim is neither.
local function quick(state, a)
  if ARGV[a + 9] ~= '' then return end
  local st = redis.call('HMGET', state, 'incarnation', 'newest', 'open', 'last_to', 'pause', 'skip', 'early', 'off',
    'lost_before', 'lost_until')
  local at_text, open = ARGV[a + 2], st[3]
  local at, newest = tonumber(at_text), tonumber(st[2] or '0')
  if st[1] ~= incarnation or tonumber(ARGV[a + 3]) > newest then return end
  -- As in `claim`: what is over is removed, and what was planned after the loss is not concerned.
  local over
  for i = 9, 10 do
    local lost = st[i] and tonumber(st[i])
    if lost and (lost <= newest or lost > now) then
      over = over or {}
      for _, field in ipairs(i == 9 and { 'lost_before' } or { 'lost_until', 'lost_why', 'first_wait' }) do
        over[#over + 1] = field
      end
    elseif lost and at <= lost then
      return
    end
  end
  if over then redis.call('HDEL', state, unpack(over)) end
  if open then
    -- Checks that exactly one entry is open, that it is for the claimed occurrence, and that another run holds it. No
    -- part of a JSON string looks like a member, because quotes inside a string are escaped.
    if newest == at and string.find(open, '"occurrence":' .. at_text, 1, true)
      and not string.find(open, '},{', 1, true) and not string.find(open, '"next_attempt":', 1, true)
      and not string.find(open, ARGV[a + 4], 1, true) then
      return string.sub(open, 2, -2)
    end
  elseif at > newest and now_us >= at * 1000 and now <= tonumber(ARGV[a + 5]) and not st[5]
    and (not st[6] or st[6] == '0') and not st[7] and not st[8] and (not st[4] or at >= tonumber(st[4])) then
    redis.call('HSET', state, 'newest', at_text, 'open', '[{"occurrence":' .. at_text
      .. ',"attempt":1,"trigger":"' .. ARGV[a + 7] .. '",' .. ARGV[a + 8] .. GRANTED .. ']')
    return 1
  end
end

local out = { int(now_us), incarnation }
if in_doubt then
  for i = 1, #KEYS / 2 do out[i + 2] = { 'in_doubt' } end
  return out
end
-- These answers change visible state.
local SEEN = { granted = true, recorded = true }
local changed = {}
for i = 1, #KEYS / 2 do
  local state, a = KEYS[2 * i - 1], 3 + (i - 1) * 9
  local answer = quick(state, a) or claim({ state = state, history = KEYS[2 * i], job = ARGV[a + 1],
    at_text = ARGV[a + 2], at = tonumber(ARGV[a + 2]), known = tonumber(ARGV[a + 3]), run = ARGV[a + 4],
    start_by = tonumber(ARGV[a + 5]), overlap = ARGV[a + 6], trigger = ARGV[a + 7], entry = ARGV[a + 8],
    extra = ARGV[a + 9], asked = {} })
  if type(answer) == 'table' and answer.err then return answer end
  out[i + 2] = answer
  if answer == 1 or type(answer) == 'table' and SEEN[answer[1]] then changed[#changed + 1] = ARGV[a + 1] end
end
if #changed > 0 then publish_changes(channel, changed) end
return out

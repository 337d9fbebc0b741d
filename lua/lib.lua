-- lib.lua: what the scripts below share; each of them is sent as lib.lua followed by its own file.
--   redis-cli --eval <(cat lua/lib.lua lua/renew.lua) ...     runs one by hand.
--
-- State of a job: a hash with no expiry. Fields, as in src/logic/claim.rs `State` (absent: empty):
--   inc sched def   strings          since newest skip to   integers, milliseconds but for `skip`
--   open triggers triggered   JSON arrays      last pause   JSON objects      waiting   1
--   `to` repeats last.to, so that most claims need not decode `last`.
-- Redis numbers every server start with a run id: with it a restart, failover or rollback is seen inside the
-- script, where nothing can happen between the look and the decision.

local t = redis.call('TIME')
local now_us = tonumber(t[1]) * 1000000 + tonumber(t[2])
local now = math.floor(now_us / 1000)
local info = redis.call('INFO', 'server')
local _, mark = string.find(info, '\nrun_id:', 1, true) -- a plain search: a pattern alone takes a microsecond more
local inc = mark and string.match(info, '^%x+', mark + 1)

local HISTORY_KEPT, HISTORY_TTL = 200, '2592000000' -- runs of a job, milliseconds

local function int(n) return string.format('%.0f', n) end

-- The output of a run goes when its record does: it has a key of its own, beside the history's.
local function push_history(key, record)
  for _ = HISTORY_KEPT + 1, redis.call('LPUSH', key, record) do
    local run = string.match(redis.call('RPOP', key), '"run_id":"([%x-]+)"')
    if run then redis.call('DEL', string.sub(key, 1, -8) .. 'output:' .. run) end
  end
  redis.call('PEXPIRE', key, HISTORY_TTL)
end

local function save_list(key, field, list)
  if #list == 0 then redis.call('HDEL', key, field) else redis.call('HSET', key, field, cjson.encode(list)) end
end

-- `last` as it is after the open entry `e` ended at `to` with `outcome`.
local function save_last(key, e, outcome, to)
  redis.call('HSET', key, 'to', int(to), 'last', cjson.encode({
    occurrence = e.occurrence, attempt = e.attempt, run = e.run, instance = e.instance, outcome = outcome,
    from = e.granted_at, to = to }))
end

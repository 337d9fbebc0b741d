-- lib.lua: what the scripts below share; each of them is sent as constants, lib.lua and its own file. The constants (names in
-- capitals) are those of src/store/redis/script.rs.
-- The last argument of every script is what the caller believes the server's clock to show (ms), or empty.
--
-- State of a job: a hash with no expiry. Fields, as in `State` in src/logic/claim/state.rs (absent: empty):
--   incarnation schedule definition   strings (the latter two are digests)
--   since newest resumed skip_at off last_to skip   integers, milliseconds but for `skip`
--   open triggers triggered early   JSON arrays      last pause   JSON objects      waiting   1
--   `last_to` repeats last.to, so that most claims need not decode `last`.
-- Redis gives the data of every primary a replication id: with it a restart, failover or rollback is seen inside the
-- script, where nothing can happen between the look and the decision.

local t = redis.call('TIME')
local now_us = tonumber(t[1]) * 1000000 + tonumber(t[2])
local now = math.floor(now_us / 1000)

-- The server's clock is in doubt when it is not where the caller believes it to be: behind by more than a second, or
-- ahead by more than a request may be on its way. Then nothing is decided, and what must be written is dated by the
-- caller's clock. The same as `in_doubt` in src/logic/belief.rs. Answers tell `now_us` as the server's clock shows it.
local believed = tonumber(ARGV[#ARGV])
local in_doubt = believed and (now < believed - BEHIND or now > believed + AHEAD)
if in_doubt then now = believed end

-- What names the data: it is another one after each start of a primary, after a promotion, and where a server's data
-- was replaced by another's (REPLICAOF and back), although the process and its run id stay.
local info = redis.call('INFO', 'replication')
if not string.find(info, 'role:master', 1, true) then
  return redis.error_reply('READONLY this server is a replica: soloist needs the primary')
end
local _, mark = string.find(info, '\nmaster_replid:', 1, true) -- a plain search: a pattern takes a microsecond more
local incarnation = mark and string.match(info, '^%x+', mark + 1)

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

-- The key of a trigger that is decided as `at` joins those that are remembered. The list may be long, so it is
-- not decoded: old ones are forgotten where the next trigger is put in.
local function remember_key(state, key, at)
  local before = redis.call('HGET', state, 'triggered')
  redis.call('HSET', state, 'triggered', (before and string.sub(before, 1, -2) .. ',' or '[')
    .. '{"key":' .. cjson.encode(key) .. ',"occurrence":' .. int(at) .. ',"at":' .. int(now) .. '}]')
end

-- `last` as it is after the open entry `e` ended at `to` with `outcome`.
local function save_last(key, e, outcome, to)
  redis.call('HSET', key, 'last_to', int(to), 'last', cjson.encode({
    occurrence = e.occurrence, attempt = e.attempt, run = e.run, instance = e.instance, outcome = outcome,
    from = e.granted_at, to = to }))
end

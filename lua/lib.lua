-- lib.lua: what the scripts share. soloist sends each script as constants, lib.lua and its own file. The constants
-- (names in capitals) come from src/store/redis/script.rs.
-- The last argument of every script is the time (ms) that the caller believes the server's clock to show, or empty.
--
-- The state of a job is a hash without expiry. Its fields, as in `State` in src/logic/claim/state.rs (absent: empty):
--   incarnation schedule definition lost_why skip_by resumed_by rewound_by   strings (the second and third are digests)
--   since newest lost_before lost_until resumed skip_at off last_to skip   integers; all but `skip` are milliseconds
--   open triggers triggered early   JSON arrays      last lapsed pause   JSON objects      waiting first_wait   1
--   `last_to` repeats last.to, so that most claims need not decode `last`.
-- Redis gives the data of every primary a replication id. By that id the script itself notices a restart, failover or
-- rollback, and nothing can happen between this check and the decision.

local t = redis.call('TIME')
local now_us = tonumber(t[1]) * 1000000 + tonumber(t[2])
local now = math.floor(now_us / 1000)

-- The server's clock is in doubt if it differs from the time that the caller believes: if it is behind by more than a
-- second, or ahead by more than a request may take to arrive. Then the scripts decide nothing, and date what they must
-- write by the believed time. The same rule as `in_doubt` in src/logic/belief.rs. `now_us` in the answers is always the
-- time that the server's clock shows.
local believed = tonumber(ARGV[#ARGV])
local in_doubt = believed and (now < believed - BEHIND or now > believed + AHEAD)
if in_doubt then now = believed end

-- The incarnation is the replication id, which names the data. It changes at each start of a primary, at a promotion,
-- and when another server's data replaces this server's (REPLICAOF and back), although the process and its run id stay.
local info = redis.call('INFO', 'replication')
if not string.find(info, 'role:master', 1, true) then
  return redis.error_reply('READONLY this server is a replica: soloist needs the primary')
end
local _, mark = string.find(info, '\nmaster_replid:', 1, true) -- a plain search: a pattern takes a microsecond more
local incarnation = mark and string.match(info, '^%x+', mark + 1)

local function int(n) return string.format('%.0f', n) end

-- Adds a record. The output of a run, which has its own key beside the history's, is removed together with its record.
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

-- Adds the key of a trigger that is decided as `at` to the remembered keys. Does not decode the list, which may be
-- long: the request that adds the next trigger removes old keys.
local function remember_key(state, key, at)
  local before = redis.call('HGET', state, 'triggered')
  redis.call('HSET', state, 'triggered', (before and string.sub(before, 1, -2) .. ',' or '[')
    .. '{"key":' .. cjson.encode(key) .. ',"occurrence":' .. int(at) .. ',"at":' .. int(now) .. '}]')
end

-- Tells who shows the state of jobs that it has changed. Users of earlier versions may lack the right to this channel.
local function publish_changes(channel, jobs) redis.pcall('PUBLISH', channel .. ':changes', cjson.encode(jobs)) end

-- When a run ended, if not at `to`, until when its job was busy.
local function unless_at(to, ended) return ended ~= to and ended or nil end

-- Sets `last` after the open entry `e`, whose command was started at `started` (nil: it never was, or nobody knows),
-- ended at `ended` with `outcome`. Its job was busy until `to`.
local function save_last(key, e, outcome, started, to, ended)
  redis.call('HSET', key, 'last_to', int(to), 'last', cjson.encode({
    occurrence = e.occurrence, attempt = e.attempt, run = e.run, instance = e.instance, outcome = outcome,
    from = e.granted_at, started = started, to = to, ended = unless_at(to, ended) }))
end

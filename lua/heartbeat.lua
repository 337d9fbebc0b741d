-- heartbeat.lua: say that an instance lives, and learn who else does, who is asked to drain, and which
-- incarnation of the store this is.
--
-- KEYS[1]  instances  <ns>:instances   hash: instance -> JSON {seen, ...}
-- KEYS[2]  drains     <ns>:drains      hash: instance -> 1, or since when (ms) that instance has not been known here
-- KEYS[3]  epoch      <ns>:epoch       hash: inc, born (ms), quarantine (ms), open (0 or 1)
-- ARGV[1]  instance   empty: only look
-- ARGV[2]  info       JSON members without `seen`; empty: the instance leaves
-- ARGV[3]  quarantine the longest that this instance needs, ms
-- ARGV[4]  open       `<inc>/<born>`: the caller has seen this epoch for `quarantine` and vouches for it
--
-- An epoch is the time from a start of the server, or from the loss of its data, to the next. It is open when
-- nobody can hold a lease from before it that was not reclaimed; new jobs are taken up in an open epoch only.
--
-- Returns  {now_us, inc, born, quarantine, open, instances, drains}   the last two as HGETALL gives them
local FORGET = 86400000 -- milliseconds after which an instance that is gone is forgotten
redis.call('PERSIST', KEYS[3]) -- see renew.lua: a fleet must stay visible on a full server
local born = tonumber(redis.call('HGET', KEYS[3], 'born') or '')
if redis.call('HGET', KEYS[3], 'inc') ~= inc or not born then
  born = now
  redis.call('DEL', KEYS[3])
  redis.call('HSET', KEYS[3], 'inc', inc, 'born', int(born), 'quarantine', 0, 'open', 0)
end
local quarantine = math.max(tonumber(redis.call('HGET', KEYS[3], 'quarantine')), tonumber(ARGV[3]))
if ARGV[1] ~= '' then
  redis.call('HSET', KEYS[3], 'quarantine', int(quarantine))
  if ARGV[4] == inc .. '/' .. int(born) then redis.call('HSET', KEYS[3], 'open', 1) end
  if ARGV[2] == '' then
    redis.call('HDEL', KEYS[1], ARGV[1])
    redis.call('HDEL', KEYS[2], ARGV[1])
  else
    redis.call('HSET', KEYS[1], ARGV[1], '{"seen":' .. int(now) .. ',' .. ARGV[2] .. '}')
    redis.call('PEXPIRE', KEYS[1], FORGET)
  end
end
local all, live = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #all, 2 do
  if ARGV[1] ~= '' and cjson.decode(all[i + 1]).seen < now - FORGET then
    redis.call('HDEL', KEYS[1], all[i])
  else
    live[#live + 1] = all[i]
    live[#live + 1] = all[i + 1]
  end
end
-- A drain lasts until it is taken back or its instance leaves. It goes a while after an instance that was forgotten:
-- a server's clock that jumps ahead for a moment makes living ones look like that, until their next heartbeat.
local drains, kept = redis.call('HGETALL', KEYS[2]), {}
for i = 1, #drains, 2 do
  local known, since = redis.call('HGET', KEYS[1], drains[i]) ~= false, tonumber(drains[i + 1]) or 1
  if not known and since > 1 and since < now - FORGET then
    redis.call('HDEL', KEYS[2], drains[i])
  else
    if known ~= (since == 1) then redis.call('HSET', KEYS[2], drains[i], known and 1 or int(now)) end
    kept[#kept + 1] = drains[i]
    kept[#kept + 1] = drains[i + 1]
  end
end
return { int(now_us), inc, int(born), int(quarantine), redis.call('HGET', KEYS[3], 'open'), live, kept }

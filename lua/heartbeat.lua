-- heartbeat.lua: records that an instance lives, and returns the other instances, those that are told to drain, and the
-- epoch of the store.
--
-- KEYS[1]  instances  <ns>:instances   hash: instance -> JSON {seen, ...}
-- KEYS[2]  drains     <ns>:drains      hash: instance -> a number, and who asked last: 1, it drains; 0, it does no
--                     longer; or since when (ms) it drains and the store has no entry of it
-- KEYS[3]  epoch      <ns>:epoch       hash: incarnation, id, born (ms), quarantine (ms), open (0 or 1)
-- KEYS[4]  jobs       <ns>:jobs        only read: it is there if the store holds a fleet's data
-- ARGV[1]  instance   empty: only read
-- ARGV[2]  info       JSON members without `seen`; empty: the instance leaves
-- ARGV[3]  quarantine the longest that this instance needs, ms
-- ARGV[4]  open       `<incarnation>/<id>` of an epoch that the caller has seen for a whole quarantine: open it;
--                     `new`, without an instance: somebody says that nothing of this fleet runs anywhere, so that the
--                     epoch may begin open. It does only if the store knows no instance, no drain and no job
-- ARGV[5]  id         the id for the epoch if it begins now
-- ARGV[6]  process    of the caller: an instance that leaves does not remove the entry of another process of its name
--
-- An epoch lasts from one start of the server, or loss of its data, to the next. It is open when no instance can still
-- hold a lease from before it that it did not reclaim. Instances adopt new jobs only in an open epoch.
--
-- Returns  {now_us, incarnation, id, born, quarantine, open, instances, drains, before}
--          instances as HGETALL returns them, drains too; before: the previous
--          entry of this instance, or empty
local function decoded(text)
  local well, info = pcall(cjson.decode, text)
  return well and type(info) == 'table' and info or {}
end

redis.call('PERSIST', KEYS[3]) -- see renew.lua; the fleet must stay visible even if the server is full
local epoch = redis.call('HMGET', KEYS[3], 'incarnation', 'id', 'born', 'quarantine', 'open')
local other = epoch[1] and epoch[1] ~= incarnation
if epoch[1] ~= incarnation or not epoch[2] then
  -- The later of both clocks: occurrences that were planned before the birth and have no record are given up, and must
  -- not run twice.
  local born = int(math.max(now, believed or now))
  epoch = { incarnation, ARGV[5], born, '0', '0' }
  redis.call('DEL', KEYS[3])
  redis.call('HSET', KEYS[3], 'incarnation', incarnation, 'id', ARGV[5], 'born', born, 'quarantine', 0, 'open', 0)
end
if ARGV[1] == '' and ARGV[4] == 'new' and not other and epoch[5] == '0'
  and redis.call('EXISTS', KEYS[1], KEYS[2], KEYS[4]) == 0 then
  -- The caller recognises its id: a second instance that says the same finds an open epoch with another one.
  epoch[2], epoch[5] = ARGV[5], '1'
  redis.call('HSET', KEYS[3], 'id', ARGV[5], 'open', 1)
end
local quarantine = math.max(tonumber(epoch[4]), tonumber(ARGV[3]))
local before
if ARGV[1] ~= '' then
  redis.call('HSET', KEYS[3], 'quarantine', int(quarantine))
  if ARGV[4] == incarnation .. '/' .. epoch[2] then
    epoch[5] = '1'
    redis.call('HSET', KEYS[3], 'open', 1)
  end
  before = redis.call('HGET', KEYS[1], ARGV[1])
  if ARGV[2] ~= '' then
    redis.call('HSET', KEYS[1], ARGV[1], '{"seen":' .. int(now) .. ',' .. ARGV[2] .. '}')
    redis.call('PEXPIRE', KEYS[1], FORGET_INSTANCE)
  elseif before and (decoded(before).process or 0) == tonumber(ARGV[6]) then
    redis.call('HDEL', KEYS[1], ARGV[1])
    redis.call('HDEL', KEYS[2], ARGV[1])
  end
end
local all, live = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #all, 2 do
  -- Treat an entry that no instance wrote like that of an instance that has not been seen for long.
  if ARGV[1] ~= '' and (tonumber(decoded(all[i + 1]).seen) or 0) < now - FORGET_INSTANCE then
    redis.call('HDEL', KEYS[1], all[i])
  else
    live[#live + 1] = all[i]
    live[#live + 1] = all[i + 1]
  end
end
-- A drain lasts until it is taken back or its instance leaves. If the instance is forgotten, the drain is removed only
-- a while later, because a server's clock that jumps ahead for a moment makes living instances look forgotten until
-- their next heartbeat.
local drains, kept = redis.call('HGETALL', KEYS[2]), {}
for i = 1, #drains, 2 do
  local since, by = string.match(drains[i + 1], '^(%d+)(.*)$')
  local known = redis.call('HGET', KEYS[1], drains[i]) ~= false
  since, by = tonumber(since) or 1, by or ''
  if not known and since ~= 1 and since < now - FORGET_INSTANCE then
    redis.call('HDEL', KEYS[2], drains[i])
  else
    if since ~= 0 and known ~= (since == 1) then
      redis.call('HSET', KEYS[2], drains[i], (known and 1 or int(now)) .. by)
    end
    kept[#kept + 1] = drains[i]
    kept[#kept + 1] = int(since) .. by
  end
end
return { int(now_us), incarnation, epoch[2], epoch[3], int(quarantine), epoch[5], live, kept, before or '' }

-- lock/leave.lua: give back one level of a reentrant lock; the last one frees it and tells who waits.
--
-- KEYS[1]  lock     <ns>:{<key>}:lock    hash, see enter.lua
-- ARGV[1]  owner    ARGV[2] nonce   unique for each step; asking again with it takes off nothing more
-- ARGV[3]  channel  <ns>:{<key>}:released; the message is the owner
--
-- Returns  {1, levels}  that are left; 0: it is free
--          {0, holder}  another has it (empty: nobody)
local has = redis.call('HMGET', KEYS[1], 'owner', 'count', 'last')
if has[1] ~= ARGV[1] then
  return { 0, has[1] or '' }
end
local count = tonumber(has[2])
if has[3] == ARGV[2] then
  return { 1, count }
end
if count <= 1 then
  redis.call('DEL', KEYS[1])
  redis.call('PUBLISH', ARGV[3], ARGV[1])
  return { 1, 0 }
end
-- A server that is full refuses HSET as a script's first write; PERSIST changes nothing here and is never refused.
local left = redis.call('PTTL', KEYS[1])
redis.call('PERSIST', KEYS[1])
redis.call('HSET', KEYS[1], 'count', count - 1, 'last', ARGV[2])
redis.call('PEXPIRE', KEYS[1], left)
return { 1, count - 1 }

-- lock/enter.lua: take a reentrant lock, or one level more of it.
--
-- KEYS[1]  lock    <ns>:{<key>}:lock    hash, expires: owner, count (levels), last (nonce of the last step), token
-- KEYS[2]  fence   <ns>:{<key>}:fence   as in try_lock.lua
-- ARGV[1]  owner   ARGV[2] nonce   unique for each step; asking again with it gives the same answer
-- ARGV[3]  lease   milliseconds, by the server's wall clock; never shortens what is left
-- ARGV[4]  kept    milliseconds for which the fence outlives the lease
--
-- Returns  {1, token, levels}      entered
--          {0, remaining, holder}  held by another for at most `remaining` milliseconds
--          {2}                     this step was taken, and its lock is over
local has = redis.call('HMGET', KEYS[1], 'owner', 'count', 'last', 'token')
if has[1] and has[1] ~= ARGV[1] then
  return { 0, redis.call('PTTL', KEYS[1]), has[1] }
end
if has[1] then
  local left = redis.call('PTTL', KEYS[1])
  redis.call('PEXPIRE', KEYS[1], math.max(left, tonumber(ARGV[3])))
  local count = tonumber(has[2])
  if has[3] ~= ARGV[2] then
    count = count + 1
    redis.call('HSET', KEYS[1], 'count', count, 'last', ARGV[2])
  end
  return { 1, tonumber(has[4]), count }
end
local fence = redis.call('HMGET', KEYS[2], 'token', 'owner')
if fence[2] == ARGV[2] then
  return { 2 }
end
local t = redis.call('TIME')
local token = math.max(tonumber(fence[1] or '0') + 1, tonumber(t[1]) * 1000000 + tonumber(t[2]))
local text = string.format('%.0f', token)
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'count', 1, 'last', ARGV[2], 'token', text)
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('HSET', KEYS[2], 'token', text, 'owner', ARGV[2])
redis.call('PEXPIRE', KEYS[2], tonumber(ARGV[3]) + tonumber(ARGV[4]))
return { 1, token, 1 }

-- lock/try_lock.lua: try once to take a lock of the library.
--
-- KEYS[1]  lock    <ns>:{<key>}:lock    string `<owner>`, expires; a hash when a ReentrantLock has it
-- KEYS[2]  fence   <ns>:{<key>}:fence   hash: token of the last grant, and its owner; expires a week after the lease
-- ARGV[1]  owner   unique for each attempt to lock; asking again with it gives the same answer
-- ARGV[2]  lease   milliseconds, > 0, counted by the server's wall clock
-- ARGV[3]  kept    milliseconds for which the fence outlives the lease
--
-- Returns  {1, token}              taken
--          {0, remaining, holder}  held by another for at most `remaining` milliseconds (-1: it does not expire)
--          {2}                     this owner had the lock, and it is over: a request that came late must not take
--                                  it again for somebody who has gone on
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then
  return { 0, redis.call('PTTL', KEYS[1]), holder }
end
local fence = redis.call('HMGET', KEYS[2], 'token', 'owner')
local last = tonumber(fence[1] or '0')
if holder then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return { 1, last }
end
if fence[2] == ARGV[1] then
  return { 2 }
end
-- The clock makes tokens grow where the fence was lost or has expired; the fence does where the clock went back.
local t = redis.call('TIME')
local token = math.max(last + 1, tonumber(t[1]) * 1000000 + tonumber(t[2]))
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('HSET', KEYS[2], 'token', string.format('%.0f', token), 'owner', ARGV[1])
redis.call('PEXPIRE', KEYS[2], tonumber(ARGV[2]) + tonumber(ARGV[3]))
return { 1, token }

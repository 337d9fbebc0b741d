-- lock/renew.lua: renew the lease of exactly one owner, for all levels. Never creates a lock that is gone: that would
-- hide that the server lost its data.
--
-- KEYS[1]  lock       <ns>:{<key>}:lock    see try_lock.lua
-- ARGV[1]  owner
-- ARGV[2]  ttl        milliseconds from now on, by the server's wall clock: lease + fence_ttl
-- ARGV[3]  fence_ttl  milliseconds
-- ARGV[4]  levels     if given: the lock is a ReentrantLock
--
-- Returns  1       renewed
--          holder  another owner holds it (empty: nobody)
local was = redis.call('GET', KEYS[1])
local left = was and redis.call('PTTL', KEYS[1]) or 0
if left < 0 then
  return was
end
if left <= tonumber(ARGV[3]) or string.sub(was, 17, 17) == '~' then
  return ''
end
local holder = string.sub(was, 18)
local owner = string.match(holder, '^\t%d+\t[^\t]*\t[^\t]*\t(.*)$')
if (owner == nil) ~= (ARGV[4] == nil) then
  return redis.error_reply('WRONGTYPE it is a lock of the other kind')
end
if (owner or holder) ~= ARGV[1] or string.sub(was, 17, 17) == '=' then
  return owner or holder
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1

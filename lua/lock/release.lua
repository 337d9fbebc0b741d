-- lock/release.lua: give a lock back, if exactly this owner has it, and tell who waits.
--
-- KEYS[1]  lock     <ns>:{<key>}:lock    see try_lock.lua
-- ARGV[1]  owner
-- ARGV[2]  kept     milliseconds
-- ARGV[3]  keep     if given: milliseconds for which nobody shall have it yet (lock_at_least_for)
--
-- Publishes the owner in <ns>:{<key>}:released if somebody waits.
--
-- Returns  1       given back
--          holder  another has it (empty: nobody)
local call, key = redis.call, KEYS[1]
local was = call('GET', key)
local left = was and call('PTTL', key) or 0
if left < 0 then
  return was
end
if left <= tonumber(ARGV[2]) then
  return ''
end
local holder, mark = string.sub(was, 18), string.sub(was, 17, 17)
if string.sub(holder, 1, 1) == '\t' then
  return redis.error_reply('WRONGTYPE a ReentrantLock has it')
end
if holder ~= ARGV[1] then
  return holder
end
if mark == '=' then
  return 1
end
if ARGV[3] then
  -- A server that is full refuses SET as a script's first write, but not PEXPIRE, nor SET after it.
  local ttl = ARGV[3] + ARGV[2]
  call('PEXPIRE', key, ttl)
  call('SET', key, string.sub(was, 1, 16) .. '=' .. holder, 'PX', ttl)
else
  call('PEXPIRE', key, ARGV[2])
end
if mark == '!' then
  call('PUBLISH', string.sub(key, 1, -5) .. 'released', ARGV[1])
end
return 1

-- lock/release.lua: give a lock back, if exactly this owner has it, and tell who waits.
--
-- KEYS[1]  lock     <ns>:{<key>}:lock    see try_lock.lua
-- ARGV[1]  owner
-- ARGV[2]  kept     milliseconds
-- ARGV[3]  keep     milliseconds for which nobody shall have it yet (lock_at_least_for); empty: anybody may at once
-- ARGV[4]  unsure   if given: the owner does not count on having it still; whether it has lapsed is looked at, too. (Else it
--                   counts as given back by its owner also if it has, unless somebody has had it since.)
--
-- Publishes the owner in <ns>:{<key>}:released if somebody waits.
--
-- Returns  1       given back
--          holder  another has it (empty: nobody)
local call, key, owner = redis.call, KEYS[1], ARGV[1]
local was = call('GET', key)
local mark = was and string.sub(was, 17, 17)
if not was or mark == '~' and string.find(was, '%D') == 17 then
  return ''
end
-- Most of a script's time goes into making strings, long ones above all: the holder is compared where it stands.
local ours = #was == 17 + #owner and string.find(was, owner, 18, true)
if ARGV[4] or not ours then
  local left = call('PTTL', key)
  if left < 0 then
    return was
  end
  if left <= tonumber(ARGV[2]) then
    return ''
  end
end
if not ours then
  local holder = string.sub(was, 18)
  if string.sub(holder, 1, 1) == '\t' then
    return redis.error_reply('WRONGTYPE a ReentrantLock has it')
  end
  return holder
end
if mark == '=' then
  return 1
end
if ARGV[3] ~= '' then
  -- A server that is full refuses SET as a script's first write, but not PEXPIRE, nor SET after it.
  local ttl = ARGV[3] + ARGV[2]
  call('PEXPIRE', key, ttl)
  call('SET', key, string.sub(was, 1, 16) .. '=' .. owner, 'PX', ttl)
else
  local said = redis.pcall('SETRANGE', key, 16, '~')
  if type(said) == 'table' then
    -- It is full, too: the time has to say it.
    call('PEXPIRE', key, ARGV[2])
  end
end
if mark == '!' then
  call('PUBLISH', string.sub(key, 1, -5) .. 'released', owner)
end
return 1

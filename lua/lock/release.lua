-- lock/release.lua: give a lock back, if exactly this owner has it, and tell who waits.
--
-- KEYS[1]  lock     <ns>:{<key>}:lock    see try_lock.lua
-- KEYS[2]  value    no key: what batch.lua alone has found at the lock, if anything
-- ARGV[1]  owner
-- ARGV[2]  fence_ttl     milliseconds
-- ARGV[3]  keep_for      milliseconds for which nobody shall have it yet (lock_at_least_for); empty: anybody may
-- ARGV[4]  check_expiry  if given and not empty: the owner is not sure to have it still, so whether it has lapsed is
--                        checked, too. (Else it counts as given back by its owner also if it has, unless somebody has
--                        had it since.)
-- ARGV[5]  unanswered    if given: the try_lock got no answer, and may arrive after this. It shall find that its lock
--                        is over: where nobody has the lock, its owner is noted as the last one who gave it back.
--
-- Publishes the owner in <ns>:{<key>}:released if somebody waits.
--
-- Returns  1       given back
--          holder  another has it (empty: nobody)
local call, key, owner = redis.call, KEYS[1], ARGV[1]
local was = KEYS[2] or call('GET', key)
local mark = was and string.sub(was, 17, 17)
-- Nobody has it. An hour is longer than any request is under way.
local function over(left)
  if ARGV[5] and (not was or string.find(string.sub(was, 1, 17), '^%d+[.!=~]$')) then
    local last = was and string.sub(was, 1, 16) or '0000000000000000'
    -- On a server without room for it, there is none for the lock either.
    redis.pcall('SET', key, last .. '~' .. owner, 'PX', math.max(1, left))
  end
  return ''
end
if not was then
  return over(3600000)
end
if mark == '~' and string.find(was, '%D') == 17 then
  return over(ARGV[5] and call('PTTL', key))
end
-- Most of a script's time goes into making strings, long ones above all: the holder is compared where it stands.
local ours = #was == 17 + #owner and string.find(was, owner, 18, true)
if not ours or (ARGV[4] or '') ~= '' then
  local left = call('PTTL', key)
  if left < 0 then
    return was
  end
  if left <= tonumber(ARGV[2]) then
    return over(left)
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
  local said = redis.pcall('SETRANGE', key, '16', '~')
  if type(said) == 'table' then
    -- It is full, too: the time has to say it.
    call('PEXPIRE', key, ARGV[2])
  end
end
if mark == '!' then
  call('PUBLISH', string.sub(key, 1, -5) .. 'released', owner)
end
return 1

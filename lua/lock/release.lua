-- lock/release.lua: release a lock if exactly this owner holds it, and tell its waiters.
--
-- KEYS[1]  lock          <ns>:{<key>}:lock    see try_lock.lua
-- KEYS[2]  value         not a key: the value that batch.lua has read, if any; only batch.lua gives it
-- ARGV[1]  owner
-- ARGV[2]  fence_ttl     milliseconds
-- ARGV[3]  keep_for      milliseconds for which nobody may acquire the lock yet (lock_at_least_for); empty: anybody may
-- ARGV[4]  check_expiry  if given and not empty: the owner is not sure that it still holds the lock, so the script also
--                        checks whether the lock has lapsed. (Otherwise a lapsed lock also counts as released by its
--                        owner, unless somebody has held it since.)
-- ARGV[5]  unanswered    if given: the try_lock got no answer, and may arrive after this. Then it must find that its
--                        lock is over: if nobody holds the lock, its owner is noted as the last one who released it.
--
-- Publishes the owner in <ns>:{<key>}:released.
--
-- Returns  1       released
--          holder  another owner holds it (empty: nobody)
local call, key, owner = redis.call, KEYS[1], ARGV[1]
local was = KEYS[2] or call('GET', key)
local mark = was and string.sub(was, 17, 17)
-- To be called when nobody holds the lock. No request is under way for as long as an hour.
local function over(left)
  if ARGV[5] and (not was or string.find(string.sub(was, 1, 17), '^%d+[.=~]$')) then
    local last = was and string.sub(was, 1, 16) or '0000000000000000'
    -- A server that has no room for this note has no room for the lock either.
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
-- Making strings, above all long ones, takes most of a script's time: so the holder is compared in place.
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
  -- A full server refuses SET as a script's first write, but not PEXPIRE, nor SET after it.
  local ttl = ARGV[3] + ARGV[2]
  call('PEXPIRE', key, ttl)
  call('SET', key, string.sub(was, 1, 16) .. '=' .. owner, 'PX', ttl)
else
  local said = redis.pcall('SETRANGE', key, '16', '~')
  if type(said) == 'table' then
    -- A full server refuses this too: then the time to live has to show that the lock is released.
    call('PEXPIRE', key, ARGV[2])
  end
end
call('PUBLISH', string.sub(key, 1, -5) .. 'released', owner)
return 1

-- lock/try_lock.lua: try once to take a lock of the library.
--
-- KEYS[1]  lock        <ns>:{<key>}:lock    string: token (16 digits), mark, owner. It outlives its lock by
--                      `fence_ttl`, so that tokens go on growing; the lock is held while the key has more time to live
--                      than that.
--                      mark    `.` held; `!` held, and somebody waits; `=` given back, but nobody shall have it yet;
--                              `~` given back, whatever time the key has
--                      owner   of a ReentrantLock: tab, levels, tab, names of levels that are over, tab, of those that
--                              are not, tab, owner; each name between commas
-- KEYS[2]  value       no key: what batch.lua alone has found at the lock, if anything
-- ARGV[1]  owner       unique for each attempt to lock; asking again with it gives the same answer
-- ARGV[2]  ttl         milliseconds, counted by the server's wall clock: lease + fence_ttl
-- ARGV[3]  fence_ttl   milliseconds
-- ARGV[4]  subscribed  if given: the caller waits and is subscribed to the release, so it has to be published
-- ARGV[5]  now         what TIME says; given by batch.lua alone, which has asked for all of its locks
--
-- Returns  token                acquired
--          {remaining, holder}  held by another for at most `remaining` milliseconds (-1: it does not expire)
--          nothing              this owner had the lock, and it is over: a request that came late must not take it
--                               again for somebody who has gone on
local call, key, owner = redis.call, KEYS[1], ARGV[1]
local was, last = KEYS[2] or call('GET', key), ''
if was then
  local mark = string.sub(was, 17, 17)
  -- Most of a script's time goes into making strings, long ones above all: the holder is compared where it stands.
  local ours = #was == 17 + #owner and string.find(was, owner, 18, true)
  last = string.sub(was, 1, 16)
  if mark ~= '~' or string.find(last, '%D') then
    local left = call('PTTL', key)
    -- Set by hand, or by another program.
    if left < 0 or mark ~= '.' and mark ~= '!' and mark ~= '=' then
      return { left, was }
    end
    left = left - ARGV[3]
    if left > 0 then
      local holder = string.sub(was, 18)
      if string.sub(holder, 1, 1) == '\t' then
        return redis.error_reply('WRONGTYPE a ReentrantLock has it')
      end
      if ours and mark ~= '=' then
        call('PEXPIRE', key, ARGV[2])
        return last
      end
      if ARGV[4] and mark == '.' then
        -- A server that is full refuses SET as a script's first write; PERSIST changes nothing here and is never
        -- refused.
        call('PERSIST', key)
        call('SET', key, last .. '!' .. holder, 'PX', left + ARGV[3])
      end
      return { left, holder }
    end
  end
  if ours then
    return false
  end
end
-- The clock makes tokens grow where the last one was lost; the last one does where the clock went back.
local now = ARGV[5] or call('TIME')
local token = now.token or now[1] .. now[2]
if #token ~= 16 then
  token = string.format('%010.0f%06.0f', now[1], now[2])
end
now.token = token
if token <= last then
  token = string.format('%016.0f', last + 1)
end
call('SET', key, token .. '.' .. owner, 'PX', ARGV[2])
return token

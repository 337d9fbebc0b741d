-- lock/try_lock.lua: try once to acquire a lock of the library.
--
-- KEYS[1]  lock        <ns>:{<key>}:lock    string: token (16 digits), mark, owner. The key outlives its lock by
--                      `fence_ttl`, so that tokens keep growing; the lock is held while the key's time to live is
--                      longer than that.
--                      mark    `.` held; `=` released, but nobody may acquire it yet; `~` released, whatever the
--                              key's time to live is
--                      owner   of a ReentrantLock: tab, number of levels, tab, names of levels that are over, tab,
--                              names of levels that are not, tab, owner; each name between commas
-- KEYS[2]  value       not a key: the value that batch.lua has read, if any; only batch.lua gives it
-- ARGV[1]  owner       unique for each attempt to lock; asking again with it gives the same answer
-- ARGV[2]  ttl         milliseconds, by the server's wall clock: lease + fence_ttl
-- ARGV[3]  fence_ttl   milliseconds
-- ARGV[4]  now         the answer of TIME; only batch.lua gives it, which asks once for all of its locks
--
-- Returns  token                acquired
--          {remaining, holder}  another owner holds it, for at most `remaining` milliseconds (-1: it does not expire)
--          nothing              this owner had the lock, and it is over: a request that came late must not acquire it
--                               again for a caller that has gone on
-- A holder that another program wrote is cut after 1000 bytes.
local call, key, owner = redis.call, KEYS[1], ARGV[1]
local was, last = KEYS[2] or call('GET', key), ''
if was then
  local mark = string.sub(was, 17, 17)
  -- Making strings, above all long ones, takes most of a script's time: so the holder is compared in place.
  local ours = #was == 17 + #owner and string.find(was, owner, 18, true)
  last = string.sub(was, 1, 16)
  if mark ~= '~' or string.find(last, '%D') then
    local left = call('PTTL', key)
    -- A value that was set by hand, or by another program.
    if left < 0 or mark ~= '.' and mark ~= '=' then
      return { left, string.sub(was, 1, 1000) }
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
      return { left, #holder > 1000 and string.sub(holder, 1, 1000) or holder }
    end
  end
  if ours then
    return false
  end
end
-- The clock makes tokens grow if the last token was lost; the last token does if the clock went back.
local now = ARGV[4] or call('TIME')
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

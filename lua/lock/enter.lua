-- lock/enter.lua: take a reentrant lock, or one level more of it.
--
-- KEYS[1]  lock    <ns>:{<key>}:lock    see try_lock.lua
-- ARGV[1]  owner   ARGV[2] nonce   unique for each step; asking again with it gives the same answer
-- ARGV[3]  ttl     milliseconds, by the server's wall clock: lease + kept; never shortens what is left
-- ARGV[4]  kept    milliseconds
-- ARGV[5]  waits   as in try_lock.lua
--
-- Returns  {token, levels}      entered
--          {remaining, holder}  held by another for at most `remaining` milliseconds
--          nothing              this step was taken, and its lock is over
local call, key, owner, nonce = redis.call, KEYS[1], ARGV[1], ARGV[2]
local was, last = call('GET', key), ''
if was then
  local left, mark = call('PTTL', key), string.sub(was, 17, 17)
  if left < 0 or not string.find(mark, '^[.!=~]$') then
    return { left, was }
  end
  local levels, first, step, who = string.match(was, '^\t(%d+)\t([^\t]*)\t([^\t]*)\t(.*)$', 18)
  last = string.sub(was, 1, 16)
  if left > tonumber(ARGV[4]) and mark ~= '~' then
    if not who then
      return redis.error_reply('WRONGTYPE a plain lock has it')
    end
    -- As in try_lock.lua: SET would be refused as the first write, PERSIST is not.
    if who == owner then
      local count = levels + (step == nonce and 0 or 1)
      local now = string.format('%s%s\t%d\t%s\t%s\t%s', last, mark, count, first, nonce, owner)
      call('PERSIST', key)
      call('SET', key, now, 'PX', math.max(left, tonumber(ARGV[3])))
      return { tonumber(last), count }
    end
    if ARGV[5] and mark == '.' then
      call('PERSIST', key)
      call('SET', key, last .. '!' .. string.sub(was, 18), 'PX', left)
    end
    return { left - ARGV[4], who }
  end
  if nonce == first or nonce == step then
    return false
  end
end
local now = call('TIME')
local token = now[1] .. now[2]
if #token ~= 16 then
  token = string.format('%010.0f%06.0f', now[1], now[2])
end
if token <= last then
  token = string.format('%016.0f', last + 1)
end
call('SET', key, string.format('%s.\t1\t%s\t%s\t%s', token, nonce, nonce, owner), 'PX', ARGV[3])
return { tonumber(token), 1 }

-- lock/enter.lua: acquire a reentrant lock, or one more level of it.
--
-- KEYS[1]  lock        <ns>:{<key>}:lock    see try_lock.lua
-- ARGV[1]  owner
-- ARGV[2]  nonce       the name of this level; asking again with it gives the same answer
-- ARGV[3]  ttl         milliseconds, by the server's wall clock: lease + fence_ttl; never shortens what is left
-- ARGV[4]  fence_ttl   milliseconds
--
-- Returns  {token, levels}      entered
--          {remaining, holder}  another owner holds it, for at most `remaining` milliseconds
--          nothing              this level is over: a request that came late must not enter it again
local call, key, owner, nonce = redis.call, KEYS[1], ARGV[1], ARGV[2]
local was, last, over = call('GET', key), '', ','
local function is_in(list)
  return string.find(list, ',' .. nonce .. ',', 1, true)
end
if was then
  local left, mark = call('PTTL', key), string.sub(was, 17, 17)
  if left < 0 or not string.find(mark, '^[.=~]$') then
    return { left, string.sub(was, 1, 1000) }
  end
  local levels, gone, inside, who = string.match(was, '^\t(%d+)\t([^\t]*)\t([^\t]*)\t(.*)$', 18)
  last = string.sub(was, 1, 16)
  if who and is_in(gone) then
    return false
  end
  if left > tonumber(ARGV[4]) and mark ~= '~' then
    if not who then
      return redis.error_reply('WRONGTYPE a plain lock has it')
    end
    -- A full server refuses SET as a script's first write; PERSIST changes nothing here, and is never refused.
    if who == owner then
      if not is_in(inside) then
        levels, inside = levels + 1, inside .. nonce .. ','
      end
      local now = string.format('%s%s\t%d\t%s\t%s\t%s', last, mark, levels, gone, inside, owner)
      call('PERSIST', key)
      call('SET', key, now, 'PX', math.max(left, tonumber(ARGV[3])))
      return { tonumber(last), tonumber(levels) }
    end
    return { left - ARGV[4], string.sub(who, 1, 1000) }
  end
  if who then
    if is_in(inside) then
      return false
    end
    -- The newest 16 names are remembered.
    over = gone .. string.sub(inside, 2)
    local _, n = string.gsub(over, '[^,]+', '')
    over = string.gsub(over, '[^,]+,', '', math.max(0, n - 16))
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
call('SET', key, string.format('%s.\t1\t%s\t,%s,\t%s', token, over, nonce, owner), 'PX', ARGV[3])
return { tonumber(token), 1 }

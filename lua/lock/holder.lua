-- lock/holder.lua: return who holds a lock, and for how long. Changes nothing.
--
-- KEYS[1]  lock         <ns>:{<key>}:lock    see try_lock.lua
-- ARGV[1]  fence_ttl    milliseconds
--
-- Returns  {remaining, holder}  milliseconds (-1: it does not expire)
--          nothing              nobody holds it
local was = redis.call('GET', KEYS[1])
if not was then
  return false
end
local left, mark, holder = redis.call('PTTL', KEYS[1]), string.sub(was, 17, 17), string.sub(was, 18)
-- A value that was set by hand, or by another program.
if left < 0 or not string.find(mark, '^[.=~]$') then
  return { left, string.sub(was, 1, 1000) }
end
if left <= tonumber(ARGV[1]) or mark == '~' then
  return false
end
holder = string.match(holder, '^\t%d+\t[^\t]*\t[^\t]*\t(.*)$') or holder
return { left - ARGV[1], string.sub(holder, 1, 1000) }

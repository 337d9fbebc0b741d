-- lock/leave.lua: give back one level of a reentrant lock; the last one frees it and tells who waits.
--
-- KEYS[1]  lock     <ns>:{<key>}:lock    see try_lock.lua
-- ARGV[1]  owner    ARGV[2] nonce   unique for each step; asking again with it takes off nothing more
-- ARGV[3]  kept     milliseconds
--
-- Publishes the owner in <ns>:{<key>}:released if it is free and somebody waits.
--
-- Returns  levels  that are left; 0: it is free
--          holder  another has it (empty: nobody)
local call, key, owner, nonce = redis.call, KEYS[1], ARGV[1], ARGV[2]
local was = call('GET', key)
local left = was and call('PTTL', key) or 0
if left < 0 then
  return was
end
if left <= tonumber(ARGV[3]) or string.sub(was, 17, 17) == '~' then
  return ''
end
local token, mark, levels, first, step, who =
  string.match(was, '^(%d+)([.!])\t(%d+)\t([^\t]*)\t([^\t]*)\t(.*)$')
if not who then
  return redis.error_reply('WRONGTYPE a plain lock has it')
end
if who ~= owner then
  return who
end
if step == nonce then
  return tonumber(levels)
end
local count = levels - 1
if count > 0 then
  -- As in try_lock.lua: SET would be refused as the first write, PERSIST is not.
  local now = string.format('%s%s\t%d\t%s\t%s\t%s', token, mark, count, first, nonce, owner)
  call('PERSIST', key)
  call('SET', key, now, 'PX', left)
  return count
end
call('PEXPIRE', key, ARGV[3])
if mark == '!' then
  call('PUBLISH', string.sub(key, 1, -5) .. 'released', owner)
end
return 0

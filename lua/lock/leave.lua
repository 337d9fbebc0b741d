-- lock/leave.lua: release one level of a reentrant lock. Releasing the last level releases the lock and tells its
-- waiters.
--
-- KEYS[1]  lock       <ns>:{<key>}:lock    see try_lock.lua
-- ARGV[1]  owner
-- ARGV[2]  nonce      the name of the level, as in enter.lua; asking again with it releases no further level
-- ARGV[3]  fence_ttl  milliseconds
-- ARGV[4]  which      `named`: the level of this name. `newest`: the newest level; the name is that of this request.
--                     `unanswered`: the level of this name, if it was ever entered. Its `enter` got no answer, and may
--                     arrive after this: then it must find that the level is over.
--
-- Publishes the owner in <ns>:{<key>}:released if the lock is free.
--
-- Returns  levels  the number of levels that are left; 0: the lock is free
--          holder  another owner holds it (empty: nobody)
local call, key, owner, nonce, fence_ttl = redis.call, KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local was = call('GET', key)
local left = was and call('PTTL', key) or 0
if left < 0 then
  return was
end
local token, mark, levels, over, inside, who
if was then
  token, mark, levels, over, inside, who =
    string.match(was, '^(%d+)([.=~])\t(%d+)\t([^\t]*)\t([^\t]*)\t(.*)$')
end
local free = left <= fence_ttl or string.sub(was, 17, 17) == '~'
local function is_in(list, name)
  return string.find(list, ',' .. name .. ',', 1, true)
end
-- The newest 16 names are remembered.
local function note(name)
  if not is_in(over, name) then
    local _, n = string.gsub(over, '[^,]+', '')
    over = string.gsub(over, '[^,]+,', '', math.max(0, n - 15)) .. name .. ','
  end
end
local function write(ttl)
  local now = string.format('%s%s\t%d\t%s\t%s\t%s', token, mark, levels, over, inside, who)
  return redis.pcall('SET', key, now, 'PX', ttl)
end
if free then
  if ARGV[4] == 'unanswered' and (not was or string.find(string.sub(was, 1, 17), '^%d+[.=~]$')) then
    if not who then
      token = was and string.sub(was, 1, 16) or '0000000000000000'
      levels, over, inside, who = 0, ',', ',', ''
    end
    mark = '.'
    note(nonce)
    -- No request is under way for as long as an hour.
    write(was and math.max(1, math.min(left, fence_ttl)) or 3600000)
  end
  return ''
end
if not who then
  return redis.error_reply('WRONGTYPE a plain lock has it')
end
if who ~= owner then
  return who
end
if is_in(over, nonce) then
  return tonumber(levels)
end
local name = is_in(inside, nonce) and nonce or ARGV[4] == 'newest' and string.match(inside, '([^,]+),$')
if name then
  local from, to = is_in(inside, name)
  inside = string.sub(inside, 1, from) .. string.sub(inside, to + 1)
  levels = levels - 1
  note(name)
end
note(nonce)
-- As in enter.lua: a full server refuses SET as the first write, but not PERSIST and PEXPIRE.
if tonumber(levels) > 0 then
  call('PERSIST', key)
  write(left)
  return tonumber(levels)
end
call('PEXPIRE', key, fence_ttl)
write(fence_ttl)
call('PUBLISH', string.sub(key, 1, -5) .. 'released', owner)
return 0

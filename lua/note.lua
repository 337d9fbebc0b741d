-- note.lua: changes what the fleet has noted for notifications, if the caller has the lease that it says. The same rule
-- as `allows` in src/logic/notify/lease.rs.
--
-- KEYS[1]  notices  <ns>:notices   hash, see notices.lua
-- ARGV[1]  was      the lease that must be in force, or empty: none
-- ARGV[2]  lease    the lease that is in force then; no other call has the same
-- ARGV[3]  then two lists, each after the number of its items: the names and notes to set, the names to remove
--
-- Returns  {now_us, incarnation, 1, ''}               written, now or by an earlier call with the same arguments
--          {now_us, incarnation, 0, lease or empty}   this lease is in force: nothing is written
local p = 3
local function take()
  local list, n = {}, tonumber(ARGV[p])
  for i = 1, n do list[i] = ARGV[p + i] end
  p = p + n + 1
  return list
end
local set, remove = take(), take()
local lease = redis.call('HGET', KEYS[1], 'lease') or ''
if lease ~= ARGV[1] and lease ~= ARGV[2] then
  return { int(now_us), incarnation, 0, lease }
end
for i = 1, #set, 2 do redis.call('HSET', KEYS[1], set[i], set[i + 1]) end
for _, name in ipairs(remove) do redis.call('HDEL', KEYS[1], name) end
redis.call('HSET', KEYS[1], 'lease', ARGV[2])
return { int(now_us), incarnation, 1, '' }

-- lock/release.lua: give a lock back, if exactly this owner has it, and tell who waits.
--
-- KEYS[1]  lock     <ns>:{<key>}:lock    string `<owner>`, expires
-- ARGV[1]  owner
-- ARGV[2]  keep     milliseconds for which nobody shall have it yet (lock_at_least_for); 0: free at once
-- ARGV[3]  channel  <ns>:{<key>}:released; the message is the owner
--
-- Returns  {1}          given back
--          {0, holder}  another has it (empty: nobody)
local holder = redis.call('GET', KEYS[1])
if holder == ARGV[1] .. '!kept' then
  return { 1 }
end
if holder ~= ARGV[1] then
  return { 0, holder or '' }
end
if tonumber(ARGV[2]) > 0 then
  -- A server that is full refuses SET as a script's first write, but not PEXPIRE, nor SET after it.
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  redis.call('SET', KEYS[1], ARGV[1] .. '!kept', 'PX', ARGV[2])
else
  redis.call('DEL', KEYS[1])
end
redis.call('PUBLISH', ARGV[3], ARGV[1])
return { 1 }

-- lock/renew_all.lua: prolong a reentrant lock, all its levels at once.
--
-- KEYS[1]  lock    <ns>:{<key>}:lock    hash, see enter.lua
-- ARGV[1]  owner   ARGV[2] lease   milliseconds from now on, by the server's wall clock
--
-- Returns  {1}          renewed
--          {0, holder}  another has it (empty: nobody)
local holder = redis.call('HGET', KEYS[1], 'owner')
if holder ~= ARGV[1] then
  return { 0, holder or '' }
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return { 1 }

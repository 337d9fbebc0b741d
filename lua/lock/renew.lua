-- lock/renew.lua: prolong the lease of exactly one owner. Never makes a lock that is not there: that would hide that
-- the server lost its data.
--
-- KEYS[1]  lock    <ns>:{<key>}:lock    string `<owner>`, expires
-- ARGV[1]  owner   ARGV[2] lease   milliseconds from now on, by the server's wall clock
--
-- Returns  {1}          renewed
--          {0, holder}  another has it (empty: nobody)
local holder = redis.call('GET', KEYS[1])
if holder ~= ARGV[1] then
  return { 0, holder or '' }
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return { 1 }

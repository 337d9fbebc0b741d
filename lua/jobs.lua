-- jobs.lua: returns the names of all jobs that were ever adopted. Changes nothing.
--
-- KEYS[1]  jobs   <ns>:jobs   set
--
-- Returns  {now_us, incarnation, name...}
local out = { int(now_us), incarnation }
for i, name in ipairs(redis.call('SMEMBERS', KEYS[1])) do out[i + 2] = name end
return out

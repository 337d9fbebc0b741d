-- jobs.lua: returns the names of all jobs that were ever adopted. Changes nothing.
--
-- KEYS[1]  jobs   <ns>:jobs   set
--
-- Returns  {now_us, incarnation, name...}
local much = oversize(KEYS[1])
if much then return too_large(KEYS[1], much) end
local names, out = redis.call('SMEMBERS', KEYS[1]), { int(now_us), incarnation }
if #names > JOBS_MOST then return too_large(KEYS[1], #names .. ' names') end
for _, name in ipairs(names) do
  -- No job has a longer name.
  if #name <= NAME_MOST then out[#out + 1] = name end
end
return out

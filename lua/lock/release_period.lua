-- lock/release_period.lua: release a period that exactly this owner has claimed, and in which it did nothing.
--
-- KEYS[1]  period      <ns>:{<key>}:period:<ms>  string `<occurrence> <owner>`
-- ARGV[1]  owner
-- ARGV[2]  occurrence  Unix ms
--
-- Returns  {1}  released, or not this owner's any more
if redis.call('GET', KEYS[1]) == ARGV[2] .. ' ' .. ARGV[1] then
  -- The periods before it stay claimed.
  redis.call('SET', KEYS[1], string.format('%.0f ', tonumber(ARGV[2]) - 1), 'KEEPTTL')
end
return { 1 }

-- lock/claim_period.lua: claim the present period of the server's clock; one caller in each period gets it.
--
-- KEYS[1]  period    <ns>:{<key>}:period:<ms>  string `<occurrence> <owner>`: the newest period that was claimed;
--                    expires after `keep_for`
-- ARGV[1]  owner     unique for each attempt; asking again with it gives the same answer
-- ARGV[2]  period    milliseconds, > 0
-- ARGV[3]  keep_for  milliseconds for which the newest claim is remembered; longer than the period
--
-- Returns  {1, occurrence, next, who}  claimed; `occurrence` is in Unix ms, a multiple of the period; the next period
--                                      begins in `next` ms
--          {0, occurrence, next, who}  claimed before, by `who`
local period = tonumber(ARGV[2])
local t = redis.call('TIME')
local now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
local occurrence = now - now % period
local last, who = string.match(redis.call('GET', KEYS[1]) or '', '^(%-?%d+) (.*)$')
last = tonumber(last)
if last and who == ARGV[1] then
  return { 1, last, math.max(0, last + period - now), ARGV[1] }
end
-- Not `==`: a clock that was stepped back does not bring a period back.
if last and last >= occurrence then
  return { 0, last, last + period - now, who }
end
redis.call('SET', KEYS[1], string.format('%.0f', occurrence) .. ' ' .. ARGV[1], 'PX', ARGV[3])
return { 1, occurrence, occurrence + period - now, ARGV[1] }

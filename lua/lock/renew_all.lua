-- lock/renew_all.lua: prolong a reentrant lock, all its levels at once.
--
-- KEYS[1]  lock    <ns>:{<key>}:lock    see try_lock.lua
-- ARGV[1]  owner
-- ARGV[2]  ttl     milliseconds from now on, by the server's wall clock: lease + kept
-- ARGV[3]  kept    milliseconds
--
-- Returns  1       renewed
--          holder  another has it (empty: nobody)
local was = redis.call('GET', KEYS[1])
local left = was and redis.call('PTTL', KEYS[1]) or 0
if left < 0 then
  return was
end
if left <= tonumber(ARGV[3]) then
  return ''
end
local who = string.match(was, '^\t%d+\t[^\t]*\t[^\t]*\t(.*)$', 18)
if not who then
  return redis.error_reply('WRONGTYPE a plain lock has it')
end
if who ~= ARGV[1] then
  return who
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1

-- lock/look.lua: who has a lock, and for how long. Changes nothing.
--
-- KEYS[1]  lock    <ns>:{<key>}:lock    string `<owner>`, or the hash of a ReentrantLock
--
-- Returns  {remaining, holder}  milliseconds (-1: it does not expire; -2: nobody has it)
local kind = redis.call('TYPE', KEYS[1]).ok
local remaining = redis.call('PTTL', KEYS[1])
if kind == 'hash' then
  return { remaining, redis.call('HGET', KEYS[1], 'owner') or '' }
end
return { remaining, redis.call('GET', KEYS[1]) or '' }

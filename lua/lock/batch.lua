-- lock/batch.lua: take and give back many locks of the library in one call, each as its own script does it.
--
-- The functions try_lock(KEYS, ARGV) and release(KEYS, ARGV) stand before this: the files of these names.
--
-- KEYS     lock    <ns>:{<key>}:lock    of each; see try_lock.lua
-- ARGV[1]  fence_ttl    milliseconds
-- then for each key
--          step         `t` try_lock; `w` try_lock by a waiter that is subscribed to the release; `r` release
--          owner
--          ttl          of a try_lock
--
-- Returns the answer to each; the status ALONE for one that failed: it has to be asked for alone. An error on one lock
-- does not affect the others in the batch, and what was given back before it must not be asked for twice.
local answers, now, n = {}, redis.call('TIME'), 1
-- Filled anew for each: tables cost more than what is in them.
local lock, fence_ttl = {}, tonumber(ARGV[1])
local take, free = { '', '', fence_ttl, false, now }, { '', fence_ttl, '' }
for i, key in ipairs(KEYS) do
  local step, fine, answer = ARGV[n + 1]
  lock[1] = key
  if step == 'r' then
    free[1] = ARGV[n + 2]
    n = n + 2
    fine, answer = pcall(release, lock, free)
  else
    take[1], take[2], take[4] = ARGV[n + 2], ARGV[n + 3], step == 'w'
    n = n + 3
    fine, answer = pcall(try_lock, lock, take)
  end
  if not fine or type(answer) == 'table' and answer.err then
    answer = { ok = 'ALONE' }
  end
  answers[i] = answer
end
return answers

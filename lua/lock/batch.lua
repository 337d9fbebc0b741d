-- lock/batch.lua: give back and take many locks of the library in one call, each as its own script does it.
--
-- The functions try_lock(KEYS, ARGV) and release(KEYS, ARGV) stand before this: the files of these names.
--
-- KEYS     lock        <ns>:{<key>}:lock    of each; first those that are given back. See try_lock.lua
-- ARGV[1]  fence_ttl   milliseconds
-- ARGV[2]  releases    so many of the locks are given back
-- ARGV[3]  ttl         milliseconds, of the locks that are taken
-- ARGV[4]  subscribed  if not empty: the callers who take them wait, and are subscribed to their release
-- then the owner of each
--
-- Returns the answer to each; the status ALONE for one that failed: it has to be asked for alone. An error on one lock
-- does not affect the others in the batch, and what was given back before it must not be asked for twice.
local call, fence_ttl, releases = redis.call, ARGV[1], tonumber(ARGV[2])
-- What each has is read at once: a call of its own for each takes longer than anything else here but its SET.
local answers, now, values, changed = {}, call('TIME'), call('MGET', unpack(KEYS)), {}
-- Filled anew for each: tables cost more than what is in them.
local lock = {}
local take, free = { '', ARGV[3], fence_ttl, ARGV[4] ~= '', now }, { '', fence_ttl, '' }
for i, key in ipairs(KEYS) do
  -- One that stands here twice has been changed since.
  lock[1], lock[2] = key, not changed[key] and values[i]
  changed[key] = true
  local step, args = try_lock, take
  if i <= releases then
    step, args = release, free
  end
  args[1] = ARGV[4 + i]
  local fine, answer = pcall(step, lock, args)
  if not fine or type(answer) == 'table' and answer.err then
    answer = { ok = 'ALONE' }
  end
  answers[i] = answer
end
return answers

-- lock/batch.lua: release and acquire many locks of the library in one call, each as its own script does it.
--
-- The functions try_lock(KEYS, ARGV) and release(KEYS, ARGV) are put before this script; they are the files of these
-- names.
--
-- KEYS     lock        <ns>:{<key>}:lock    one for each lock, those to release first. See try_lock.lua
-- ARGV[1]  fence_ttl   milliseconds
-- ARGV[2]  releases    the number of locks to release
-- ARGV[3]  ttl         milliseconds, of the locks to acquire
-- ARGV[4]  subscribed  if not empty: the callers who acquire wait, and are subscribed to the release
-- then the owner of each lock
--
-- Returns the answer for each lock. The status ALONE means that the script failed for this lock, and that the caller
-- has to send its request alone. An error on one lock does not affect the others in the batch, and a release that was
-- made must not be sent a second time.
local call, fence_ttl, releases = redis.call, ARGV[1], tonumber(ARGV[2])
-- One call reads all locks: a call for each would take longer than anything else here but its SET.
local answers, now, values, changed = {}, call('TIME'), call('MGET', unpack(KEYS)), {}
-- These tables are filled again for each lock: making a table costs more than filling it.
local lock = {}
local take, free = { '', ARGV[3], fence_ttl, ARGV[4] ~= '', now }, { '', fence_ttl, '' }
for i, key in ipairs(KEYS) do
  -- If a key comes twice, its value has changed since it was read.
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

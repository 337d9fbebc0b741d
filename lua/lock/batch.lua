-- lock/batch.lua: release and acquire many locks of the library in one call, each as its own script does it.
--
-- The functions try_lock(KEYS, ARGV) and release(KEYS, ARGV) are put before this script; they are the files of these
-- names.
--
-- KEYS     lock        <ns>:{<key>}:lock    one for each lock. See try_lock.lua
-- ARGV[1]  fence_ttl   milliseconds
-- then for each lock
--   owner
--   ttl                milliseconds; empty: the lock is to be released
--
-- Returns the answer for each lock. The status ALONE means that the script failed for this lock, and that the caller
-- has to send its request alone. An error on one lock does not affect the others in the batch, and a release that was
-- made must not be sent a second time.
local call, fence_ttl = redis.call, ARGV[1]
-- One call reads all locks: a call for each would take longer than anything else here but its SET.
local answers, now, values, changed = {}, call('TIME'), call('MGET', unpack(KEYS)), {}
-- These tables are filled again for each lock: making a table costs more than filling it.
local lock = {}
local take, free = { '', '', fence_ttl, now }, { '', fence_ttl, '' }
for i, key in ipairs(KEYS) do
  -- If a key comes twice, its value has changed since it was read.
  lock[1], lock[2] = key, not changed[key] and values[i]
  changed[key] = true
  local step, args = try_lock, take
  if ARGV[2 * i + 1] == '' then
    step, args = release, free
  else
    take[2] = ARGV[2 * i + 1]
  end
  args[1] = ARGV[2 * i]
  local fine, answer = pcall(step, lock, args)
  if not fine or type(answer) == 'table' and answer.err then
    answer = { ok = 'ALONE' }
  end
  answers[i] = answer
end
return answers

-- notices.lua: returns what the fleet has noted for notifications. Changes nothing.
--
-- KEYS[1]  notices  <ns>:notices   hash: `lease` (see src/logic/notify/lease.rs), and notes by their names
-- ARGV[1]  all      if not empty: all notes; otherwise the note given_up, if there is one
--
-- Returns  {now_us, incarnation, lease or empty, {name, note, ...}}
local lease, notes = redis.call('HGET', KEYS[1], 'lease') or '', {}
if ARGV[1] ~= '' then
  notes = redis.call('HGETALL', KEYS[1])
else
  local note = redis.call('HGET', KEYS[1], 'given_up')
  if note then notes = { 'given_up', note } end
end
return { int(now_us), incarnation, lease, notes }

-- notices.lua: returns what the fleet has noted for notifications. Changes nothing.
--
-- KEYS[1]  notices  <ns>:notices   hash: `lease` (see src/logic/notify/stand.rs), and notes by their names
-- ARGV[1]  all      1: the lease and all notes, 0: the lease, and the note given_up if there is one
--
-- Returns  {now_us, incarnation, lease or empty, {name, note, ...}}
local lease, notes = redis.call('HGET', KEYS[1], 'lease') or '', {}
if ARGV[1] == '0' then
  local note = redis.call('HGET', KEYS[1], 'given_up')
  if note and #note > LINE_MOST then return too_large(KEYS[1], #note .. ' bytes in its field given_up') end
  if note then notes = { 'given_up', note } end
else
  local much = oversize(KEYS[1], NOTES_MOST)
  if much then return too_large(KEYS[1], much) end
  notes = redis.call('HGETALL', KEYS[1])
  local bytes = 0
  for _, text in ipairs(notes) do bytes = bytes + #text end
  if bytes > FLEET_MOST then return too_large(KEYS[1], int(bytes) .. ' bytes') end
end
if #lease > NAME_MOST then return too_large(KEYS[1], #lease .. ' bytes in its field lease') end
return { int(now_us), incarnation, lease, notes }

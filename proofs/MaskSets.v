(** * Mask sets that cover every patch (core/geometry.py, core/masks.py, core/mask_families.py) *)

From Coq Require Import List Bool Arith Lia Permutation Sorted.
From PatchCleanser Require Import Images Geometry.
Import ListNotations.

Definition ceiling (a b : nat) : nat := (a + b - 1) / b.

Lemma ceiling_spec : forall a b k, 1 <= b -> (ceiling a b <= k <-> a <= k * b).
Proof.
  intros a b k Hb. unfold ceiling.
  assert (H := Nat.div_mod (a + b - 1) b ltac:(lia)). assert (H' := Nat.mod_upper_bound (a + b - 1) b ltac:(lia)).
  set (q := (a + b - 1) / b) in *. split; intro; nia.
Qed.

(** ** One axis *)

Definition axis_length (image patch stride : nat) : nat := Nat.min (patch + stride - 1) image.

(** 0, stride, 2 stride, … below the last start, and the last start, with which a mask ends at the border. *)
Definition axis_starts (image patch stride : nat) : list nat :=
  let last := image - axis_length image patch stride in
  map (fun k => k * stride) (seq 0 (ceiling last stride)) ++ [last].

Definition axis_stride (image patch masks : nat) : nat := ceiling (image - patch + 1) masks.

Theorem axis_starts_cover : forall image patch stride, 1 <= stride ->
  forall start, start + patch <= image ->
  exists s, In s (axis_starts image patch stride) /\
    s <= start /\ start + patch <= s + axis_length image patch stride.
Proof.
  intros image patch stride Hstride start Hstart. unfold axis_starts, axis_length.
  set (last := image - Nat.min (patch + stride - 1) image).
  destruct (le_lt_dec last start) as [H|H].
  - exists last. split; [apply in_app_iff; right; now left|]. unfold last in *. lia.
  - assert (D := Nat.div_mod start stride ltac:(lia)). assert (D' := Nat.mod_upper_bound start stride ltac:(lia)).
    exists (start / stride * stride). split; [|unfold last in *; nia].
    apply in_app_iff. left. apply in_map_iff. exists (start / stride). split; [reflexivity|].
    apply in_seq. split; [lia|]. simpl.
    destruct (le_lt_dec (ceiling last stride) (start / stride)) as [C|C]; [|assumption].
    apply ceiling_spec in C; nia.
Qed.

Theorem axis_masks_lie_in_the_image : forall image patch stride s, 1 <= stride ->
  In s (axis_starts image patch stride) -> s + axis_length image patch stride <= image.
Proof.
  intros image patch stride s Hstride H. unfold axis_starts in H. apply in_app_iff in H.
  set (last := image - axis_length image patch stride) in *.
  assert (Hlast : last + axis_length image patch stride = image) by (unfold last, axis_length; lia).
  destruct H as [H|[<-|[]]]; [|lia].
  apply in_map_iff in H. destruct H as [k [<- Hk]]. apply in_seq in Hk.
  destruct (le_lt_dec (k * stride) last); [lia|].
  assert (ceiling last stride <= k) by (apply ceiling_spec; lia). lia.
Qed.

(** A mask takes `stride` of the image - patch + 1 placements. *)
Theorem axis_starts_number : forall image patch stride, 1 <= stride -> 1 <= patch -> patch <= image ->
  length (axis_starts image patch stride) = ceiling (image - patch + 1) stride.
Proof.
  intros image patch stride Hs Hp Hfits. unfold axis_starts, axis_length.
  rewrite app_length, map_length, seq_length. simpl.
  set (n := image - patch + 1).
  replace (image - Nat.min (patch + stride - 1) image) with (n - stride) by (unfold n; lia).
  assert (1 <= n) by (unfold n; lia).
  apply Nat.le_antisymm.
  - assert (H' : ceiling n stride <= ceiling n stride) by lia. apply ceiling_spec in H'; [|assumption].
    enough (ceiling (n - stride) stride <= ceiling n stride - 1).
    { destruct (ceiling n stride); simpl in *; nia. }
    apply ceiling_spec; [assumption|]. destruct (ceiling n stride); simpl in *; nia.
  - apply ceiling_spec; [assumption|].
    assert (H' : ceiling (n - stride) stride <= ceiling (n - stride) stride) by lia.
    apply ceiling_spec in H'; nia.
Qed.

(** It needs at most as many masks as were given, and no smaller stride does. *)
Theorem axis_stride_is_the_smallest : forall image patch masks stride,
  1 <= masks -> 1 <= patch -> patch <= image -> 1 <= stride ->
  (length (axis_starts image patch stride) <= masks <-> axis_stride image patch masks <= stride).
Proof.
  intros. rewrite axis_starts_number by assumption. unfold axis_stride. rewrite !ceiling_spec by assumption. nia.
Qed.

(** ** Two axes, in a room *)

Definition grid (room : window) (s strides : shape) : list window :=
  flat_map (fun down =>
      map (fun across => Window (top room + down) (left room + across)
          (axis_length (height room) (fst s) (fst strides)) (axis_length (width room) (snd s) (snd strides)))
        (axis_starts (width room) (snd s) (snd strides)))
    (axis_starts (height room) (fst s) (fst strides)).

Theorem grid_covers : forall room s strides patch,
  1 <= fst strides -> 1 <= snd strides -> placed s room patch ->
  exists m, In m (grid room s strides) /\ inside patch m.
Proof.
  intros room s strides patch Hd Ha [E [E' [H1 [H2 [H3 H4]]]]].
  destruct (axis_starts_cover (height room) (fst s) (fst strides) Hd (top patch - top room)) as [t [Ht Ht']]; [lia|].
  destruct (axis_starts_cover (width room) (snd s) (snd strides) Ha (left patch - left room)) as [l [Hl Hl']]; [lia|].
  eexists. split.
  - apply in_flat_map. exists t. split; [assumption|]. apply in_map_iff. exists l. split; [reflexivity|assumption].
  - unfold inside; simpl. lia.
Qed.

(** ** Any rectangle of at most an area *)

Definition widest (area most h : nat) : nat := Nat.min most (area / h).

(** For each height the widest rectangle, without those inside the next taller one. *)
Definition area_shapes (area : nat) (room : shape) : list shape :=
  let last := Nat.min (fst room) area in
  let next h := if h =? last then 0 else widest area (snd room) (S h) in
  filter (fun s => next (fst s) <? snd s) (map (fun h => (h, widest area (snd room) h)) (seq 1 last)).

Theorem area_shapes_hold_every_rectangle : forall area room s,
  1 <= fst s -> 1 <= snd s -> smaller s room -> fst s * snd s <= area ->
  exists big, In big (area_shapes area room) /\ smaller s big.
Proof.
  intros area room [h w] Hh Hw [Hroom Hroom'] Harea. simpl in *.
  set (last := Nat.min (fst room) area).
  assert (Hwidth : w <= widest area (snd room) h) by (apply Nat.min_glb; [lia | apply Nat.div_le_lower_bound; lia]).
  assert (Hlast : h <= last) by (apply Nat.min_glb; nia).
  (* Go to taller rectangles as long as they are as wide. *)
  remember (last - h) as steps eqn:Hsteps. clear Harea Hroom. revert h Hh Hwidth Hlast Hsteps.
  induction steps as [|steps IH]; intros h Hh Hwidth Hlast Hsteps.
  - exists (h, widest area (snd room) h). split; [|split; simpl; lia].
    apply filter_In. split.
    + apply in_map_iff. exists h. split; [reflexivity|]. apply in_seq. fold last. lia.
    + fold last. apply Nat.ltb_lt. simpl. destruct (Nat.eqb_spec h last); lia.
  - destruct (le_lt_dec w (widest area (snd room) (S h))) as [Hwider|Hnarrower].
    + destruct (IH (S h)) as [big [Hin [Hbig Hbig']]]; try lia. exists big.
      split; [assumption|]. split; simpl in *; lia.
    + exists (h, widest area (snd room) h). split; [|split; simpl; lia].
      apply filter_In. split.
      * apply in_map_iff. exists h. split; [reflexivity|]. apply in_seq. fold last. lia.
      * fold last. apply Nat.ltb_lt. simpl. destruct (Nat.eqb_spec h last); lia.
Qed.

Lemma area_shapes_fit_the_room : forall area room s, In s (area_shapes area room) -> smaller s room.
Proof.
  intros area room s H. apply filter_In in H. destruct H as [H _]. apply in_map_iff in H.
  destruct H as [h [<- Hh]]. apply in_seq in Hh. unfold smaller, widest; simpl. lia.
Qed.

Lemma shapes_have_the_area : forall area room s, In s (area_shapes area room) -> fst s * snd s <= area.
Proof.
  intros area room s H. apply filter_In in H. destruct H as [H _]. apply in_map_iff in H.
  destruct H as [h [<- Hh]]. apply in_seq in Hh. unfold widest; simpl.
  assert (D := Nat.mul_div_le area h ltac:(lia)). nia.
Qed.

(** ** A family: one rectangle for each run of neighbouring shapes

    The program finds the partition into runs with the fewest masks. The proof holds for every partition. *)

Definition taller_and_narrower (a b : shape) : Prop := fst a <= fst b /\ snd b <= snd a.

Definition run_shape (run : list shape) : shape := (fst (last run (0, 0)), snd (hd (0, 0) run)).

Lemma last_is_in : forall {A} (d : A) l, l <> [] -> In (last l d) l.
Proof. intros A d l. induction l as [|a [|b l] IH]; intro H; [congruence|now left|right; now apply IH]. Qed.

Lemma part_of_a_sorted_list_is_sorted : forall {A} (R : A -> A -> Prop) keep l,
  StronglySorted R l -> StronglySorted R (filter keep l).
Proof.
  intros A R keep l Hsorted. induction Hsorted as [|a rest Hrest IH Hfirst]; simpl; [constructor|].
  destruct (keep a); [|assumption]. constructor; [assumption|].
  apply Forall_forall. intros b Hb. apply filter_In in Hb. rewrite Forall_forall in Hfirst. now apply Hfirst.
Qed.

Lemma area_shapes_run_from_wide_to_tall : forall area room,
  StronglySorted taller_and_narrower (area_shapes area room).
Proof.
  intros area room. apply part_of_a_sorted_list_is_sorted.
  generalize (Nat.min (fst room) area) as n. intro n. assert (Hfrom : 1 <= 1) by lia. revert Hfrom.
  generalize 1 at 2 3 as from. induction n as [|n IH]; intros from Hfrom; simpl; [constructor|].
  constructor; [apply IH; lia|].
  apply Forall_forall. intros s Hs. apply in_map_iff in Hs. destruct Hs as [h [<- Hh]]. apply in_seq in Hh.
  split; simpl; [lia|]. apply Nat.min_le_compat_l, Nat.div_le_compat_l. lia.
Qed.

Theorem the_shape_of_a_run_holds_the_run : forall run s,
  StronglySorted taller_and_narrower run -> In s run -> smaller s (run_shape run).
Proof.
  intros run s Hsorted Hs. unfold smaller, run_shape. simpl. split.
  - clear -Hsorted Hs. induction Hsorted as [|a rest Hrest IH Hfirst]; [destruct Hs|].
    destruct rest as [|b rest]; [destruct Hs as [<-|[]]; reflexivity|].
    change (last (a :: b :: rest) (0, 0)) with (last (b :: rest) (0, 0)).
    destruct Hs as [<-|Hs]; [|now apply IH]. rewrite Forall_forall in Hfirst. apply Hfirst, last_is_in. discriminate.
  - destruct Hsorted as [|a rest Hrest Hfirst]; [destruct Hs|]. simpl.
    destruct Hs as [<-|Hs]; [reflexivity|]. rewrite Forall_forall in Hfirst. now apply Hfirst.
Qed.

Lemma a_run_of_a_sorted_list_is_sorted : forall {A} (R : A -> A -> Prop) lists l,
  StronglySorted R (concat lists) -> In l lists -> StronglySorted R l.
Proof.
  intros A R lists l. induction lists as [|first rest IH]; simpl; [tauto|].
  intros Hsorted [<-|Hl].
  - clear IH. induction first as [|a first IH]; [constructor|]. simpl in Hsorted. inversion_clear Hsorted.
    constructor; [now apply IH|]. apply Forall_app in H0. tauto.
  - apply IH; [|assumption]. clear -Hsorted. induction first as [|a first IH]; [assumption|].
    apply IH. simpl in Hsorted. now inversion Hsorted.
Qed.

Theorem family_covers_every_rectangle : forall area room runs strides s patch,
  concat runs = area_shapes area (height room, width room) ->
  (forall run, 1 <= fst (strides run) /\ 1 <= snd (strides run)) ->
  1 <= fst s -> 1 <= snd s -> fst s * snd s <= area -> placed s room patch ->
  exists m, In m (flat_map (fun run => grid room (run_shape run) (strides run)) runs) /\ inside patch m.
Proof.
  intros area room runs strides s patch Hruns Hstrides Hh Hw Harea Hplaced.
  destruct (area_shapes_hold_every_rectangle area (height room, width room) s) as [big [Hbig Hsmaller]]; auto.
  { destruct Hplaced as [E [E' [H1 [H2 [H3 H4]]]]]. split; simpl; lia. }
  rewrite <- Hruns in Hbig. apply in_concat in Hbig. destruct Hbig as [run [Hrun Hin]].
  assert (Hsorted : StronglySorted taller_and_narrower run).
  { eapply a_run_of_a_sorted_list_is_sorted; [|eassumption]. rewrite Hruns. apply area_shapes_run_from_wide_to_tall. }
  assert (Hfits : forall t, In t run -> smaller t (height room, width room)).
  { intros t Ht. apply area_shapes_fit_the_room with (area := area). rewrite <- Hruns. apply in_concat. eauto. }
  assert (Hrun_smaller := the_shape_of_a_run_holds_the_run run big Hsorted Hin).
  destruct (a_smaller_patch_lies_inside_a_larger_one s (run_shape run) room patch) as [v [Hv Hpatch]].
  - unfold smaller in *. lia.
  - destruct run; [destruct Hin|]. apply (Hfits (last (s0 :: run) (0, 0))), last_is_in. discriminate.
  - destruct run; [destruct Hin|]. apply (Hfits s0). now left.
  - assumption.
  - destruct (Hstrides run) as [H1 H2].
    destruct (grid_covers room (run_shape run) (strides run) v H1 H2 Hv) as [m [Hm Hinside]].
    exists m. split; [apply in_flat_map; eauto|]. unfold inside in *. lia.
Qed.

(** ** K patches: unions of K masks *)

(** Every choice of k elements, in order and with repetition. *)
Fixpoint combinations {A} (k : nat) (elements : list A) : list (list A) :=
  match k with
  | 0 => [[]]
  | S k' =>
    (fix with_first (elements : list A) : list (list A) :=
      match elements with
      | [] => []
      | a :: rest => map (cons a) (combinations k' elements) ++ with_first rest
      end) elements
  end.

Lemma combinations_hold_every_choice : forall {A} (eq_dec : forall a b : A, {a = b} + {a <> b})
    (elements chosen : list A),
  incl chosen elements -> exists c, In c (combinations (length chosen) elements) /\ Permutation chosen c.
Proof.
  intros A eq_dec elements. induction elements as [|a rest IH]; intros chosen Hincl.
  - apply incl_l_nil in Hincl. subst. exists []. split; [now left|constructor].
  - remember (length chosen) as k eqn:Hk. revert chosen Hincl Hk.
    induction k as [|k IHk]; intros chosen Hincl Hk; [destruct chosen; [|discriminate]; exists []; now split; [left|]|].
    cbn [combinations]. destruct (in_dec eq_dec a chosen) as [Ha|Ha].
    + apply in_split in Ha. destruct Ha as [before [after ->]].
      destruct (IHk (before ++ after)) as [c [Hc Hperm]].
      * intros b Hb. apply Hincl. apply in_app_iff in Hb. apply in_app_iff. simpl. tauto.
      * rewrite app_length in *. simpl in Hk. lia.
      * exists (a :: c). split; [apply in_app_iff; left; now apply in_map|].
        rewrite <- Hperm. symmetry. apply Permutation_middle.
    + destruct (IH chosen) as [c [Hc Hperm]].
      { intros b Hb. destruct (Hincl b Hb) as [->|]; [contradiction|assumption]. }
      rewrite <- Hk in Hc. exists c. split; [apply in_app_iff; now right | assumption].
Qed.

Lemma combinations_have_only_choices : forall {A} k (elements : list A) c,
  In c (combinations k elements) -> length c = k /\ incl c elements.
Proof.
  induction k as [|k IHk]; intros elements c; [intros [<-|[]]; split; [reflexivity|apply incl_nil_l]|].
  induction elements as [|a rest IH]; cbn [combinations]; [intros []|].
  intro H. apply in_app_iff in H. destruct H as [H|H].
  - apply in_map_iff in H. destruct H as [c' [<- Hc]]. apply IHk in Hc. destruct Hc as [<- Hincl].
    split; [reflexivity|]. apply incl_cons; [now left|assumption].
  - apply IH in H. split; [tauto|]. now apply incl_tl.
Qed.

Definition window_eq_dec : forall a b : window, {a = b} + {a <> b}.
Proof. repeat decide equality. Defined.

Theorem unions_cover_several_patches : forall base patches,
  (forall patch, In patch patches -> exists m, In m base /\ inside patch m) ->
  exists masks, In masks (combinations (length patches) base) /\ hides (region_of masks) (region_of patches).
Proof.
  intros base patches Hcovered.
  assert (Hchosen : exists chosen, length chosen = length patches /\ incl chosen base /\
    hides (region_of chosen) (region_of patches)).
  { induction patches as [|patch rest IH].
    - exists []. repeat split; [apply incl_nil_l|]. intros p Hp. apply region_of_iff in Hp.
      now destruct Hp as [w [[] _]].
    - destruct IH as [chosen [Hlength [Hincl Hhides]]]; [intros; apply Hcovered; now right|].
      destruct (Hcovered patch) as [m [Hm Hinside]]; [now left|].
      exists (m :: chosen). split; [simpl; lia|]. split; [now apply incl_cons|].
      intros p Hp. apply orb_true_iff in Hp. apply orb_true_iff. destruct Hp as [Hp|Hp].
      + left. apply in_window_iff in Hp. apply in_window_iff. unfold inside in Hinside. lia.
      + right. now apply Hhides. }
  destruct Hchosen as [chosen [Hlength [Hincl Hhides]]].
  destruct (combinations_hold_every_choice window_eq_dec base chosen Hincl) as [masks [Hmasks Hperm]].
  exists masks. split; [congruence|]. intros p Hp. apply Hhides, region_of_iff in Hp. apply region_of_iff.
  destruct Hp as [w [Hw Hp]]. exists w. split; [|assumption]. eapply Permutation_in; eassumption.
Qed.
